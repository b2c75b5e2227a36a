"""Many questions for a sampler: each answer is a charge of its own, and several run at once."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_dpicl.calls.flow import Either, Flow, arun, run, together
from langchain_dpicl.errors import PrivacyBudgetExceeded

Configs = RunnableConfig | list[RunnableConfig] | None

AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Answers that run at once by default: as many as a pool of threads has."""


def one_by_one(
    ask: Callable[[Any, RunnableConfig], Any], inputs: Sequence[Any], config: Configs, return_exceptions: bool
) -> list[Any]:
    """Return an answer for each input, in order; with ``return_exceptions`` an error in the place of a missing answer.

    Otherwise no answer begins after an error, and the first is raised when the running ones have ended. If it is the
    end of the budget, it says how many inputs were answered.
    """
    return run(_answers(ask, inputs, config, return_exceptions))


async def aone_by_one(
    ask: Callable[[Any, RunnableConfig], Awaitable[Any]],
    inputs: Sequence[Any],
    config: Configs,
    return_exceptions: bool,
) -> list[Any]:
    """`one_by_one`, asynchronously."""
    return await arun(_answers(ask, inputs, config, return_exceptions))


def _answers(
    ask: Callable[[Any, RunnableConfig], Any], inputs: Sequence[Any], config: Configs, return_exceptions: bool
) -> Flow[list[Any]]:
    if not inputs:
        return []
    configs, failed = get_config_list(config, len(inputs)), list[Exception]()

    def one(value: Any, config: RunnableConfig) -> Flow[list[Any]]:
        if failed and not return_exceptions:
            return [failed[0]]
        call = partial(ask, value, config)
        try:
            return [(yield Either(call, call))]  # a driver of threads calls it, one of event loops awaits it
        except Exception as error:
            failed.append(error)
            return [error]

    found = yield together(list(map(one, inputs, configs)), configs[0].get("max_concurrency") or AT_ONCE)
    answers = [answer for (answer,) in found]
    if return_exceptions or not failed:
        return answers
    if not isinstance(failed[0], PrivacyBudgetExceeded) or len(answers) == 1:
        raise failed[0]
    made = sum(not isinstance(answer, Exception) for answer in answers)
    raise PrivacyBudgetExceeded(f"{failed[0]} for this one of a batch of {len(answers)}; {made} were answered")

"""Many questions for a sampler: each answer is a charge of its own, and several run at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config

from langchain_dpicl.errors import PrivacyBudgetExceeded

Configs = RunnableConfig | list[RunnableConfig] | None

AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Answers that run at once by default: as many as a pool of threads has."""


def one_by_one(
    ask: Callable[[Any, RunnableConfig], Any], inputs: Sequence[Any], config: Configs, return_exceptions: bool
) -> list[Any]:
    """Return an answer for each input, in order; with ``return_exceptions`` an error in the place of a missing answer.

    Otherwise no answer begins after an error, and the first is raised when the running ones have ended.
    """
    if not inputs:
        return []
    configs, failed = get_config_list(config, len(inputs)), list[Exception]()

    def one(value: Any, config: RunnableConfig) -> Any:
        if failed and not return_exceptions:
            return failed[0]
        try:
            return ask(value, config)
        except Exception as error:
            failed.append(error)
            return error

    with get_executor_for_config({"max_concurrency": _at_once(configs)}) as executor:
        answers = list(executor.map(one, inputs, configs))
    return answers if return_exceptions else _unless(failed, answers)


async def aone_by_one(
    ask: Callable[[Any, RunnableConfig], Awaitable[Any]],
    inputs: Sequence[Any],
    config: Configs,
    return_exceptions: bool,
) -> list[Any]:
    """`one_by_one`, asynchronously."""
    if not inputs:
        return []
    configs, failed = get_config_list(config, len(inputs)), list[Exception]()
    gate = asyncio.Semaphore(_at_once(configs))

    async def one(value: Any, config: RunnableConfig) -> Any:
        async with gate:
            if failed and not return_exceptions:
                return failed[0]
            try:
                return await ask(value, config)
            except Exception as error:
                failed.append(error)
                return error

    answers = list(await asyncio.gather(*map(one, inputs, configs)))
    return answers if return_exceptions else _unless(failed, answers)


def _at_once(configs: Sequence[RunnableConfig]) -> int:
    return configs[0].get("max_concurrency") or AT_ONCE


def _unless(failed: Sequence[Exception], answers: list[Any]) -> list[Any]:
    """Return the answers, or raise the first error; an end of the budget says how many inputs were answered."""
    if not failed:
        return answers
    if not isinstance(failed[0], PrivacyBudgetExceeded) or len(answers) == 1:
        raise failed[0]
    made = sum(not isinstance(answer, Exception) for answer in answers)
    raise PrivacyBudgetExceeded(f"{failed[0]} for this one of a batch of {len(answers)}; {made} were answered")

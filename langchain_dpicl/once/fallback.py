"""A paid path behind a released one: a head answers what it is sure of, a private release the rest."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
)
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config
from typing_extensions import TypedDict

from langchain_dpicl.budget import Receipt
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Released
from langchain_dpicl.release.base import AnyRelease, NeverHidden


class PathReceipt(Receipt):
    """A receipt, and which path it is of: the head's is that of its fit."""

    path: Literal["head", "release"]


class PathAnswer(TypedDict):
    """The head's label, or the release's answer, with its receipt."""

    answer: Any
    receipt: PathReceipt


class HeadThenRelease(NeverHidden, Released, Runnable[Any, PathAnswer]):
    """Asks the head, and pays for a private release if the head's confidence is below a public number.

    Whether a question is paid follows from the head and the question alone: the head is released, the question public,
    so the choice costs nothing, and the plan's guarantee holds for all that is paid.
    """

    def __init__(
        self,
        head: Runnable[Any, Any],
        receipt: Receipt,
        release: AnyRelease[Any],
        below: float,
    ) -> None:
        if not isinstance(release, AnyRelease):
            raise InvalidParameter(
                "release",
                type(release).__name__,
                "a release, such as ensemble | DPAggregate(...)",
            )
        self.below = checks.real("below", below, above=0.0, at_most=1.0)
        self.head = head
        self.receipt = receipt
        self.release = release.with_receipt()

    def _answered(self, question: Any, config: RunnableConfig) -> Flow[PathAnswer]:
        found = yield Either(
            partial(self.head.invoke, question, config),
            partial(self.head.ainvoke, question, config),
        )
        if found["confidence"] >= self.below:
            return {
                "answer": found["label"],
                "receipt": cast("PathReceipt", {**self.receipt, "path": "head"}),
            }
        made = yield Either(
            partial(self.release.invoke, question, config),
            partial(self.release.ainvoke, question, config),
        )
        return {
            "answer": made["answer"],
            "receipt": cast("PathReceipt", {**made["receipt"], "path": "release"}),
        }

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> PathAnswer:
        """One answer. Raises `PrivacyBudgetExceeded` if the head is unsure and nothing is left."""

        def answer(question: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> PathAnswer:
            return run(self._answered(question, patch_config(config, callbacks=run_manager.get_child())))

        return self._call_with_config(answer, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> PathAnswer:
        """The same, asynchronously."""

        async def answer(
            question: Any,
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> PathAnswer:
            return await arun(self._answered(question, patch_config(config, callbacks=run_manager.get_child())))

        return await self._acall_with_config(answer, input, config)

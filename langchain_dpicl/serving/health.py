"""The health of a server, and its readiness: its store, its ledger and its model, each by a public look.

Nobody needs a key for either. An answer names the parts and nothing else; a part's trouble goes to the log, by the
class of its error. A look at the model is a public question, on the copy of the chain that no private call touches. No
release changes what these say, and they change nothing that a caller gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.calls.flow import arun
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.store import ExemplarStore

logger = logging.getLogger(__name__)

PATIENCE = 0.8
"""Seconds that one request waits for looks that are due. Who probes often waits a second."""

_HANGS, _AFTER_TROUBLE = 30.0, 1.0
_AGAIN = {"store": 1.0, "ledger": 1.0, "model": 60.0}
"""Seconds for which a good look counts. A hosted model is paid for each question, and not for its name."""


Look = Callable[[], Awaitable[type[BaseException] | str | None]]
"""Returns, or raises, what is wrong."""


class ReadyPart:
    """One thing that answers depend on, and the last look at it."""

    def __init__(self, name: str, looks: Sequence[Look], where: str = "") -> None:
        self.name = name
        self._shown = f"{where}{name}"
        self.ready: bool | None = None
        self._looks = looks
        self._since = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None] | None:
        """Look if the last look is old; the look under way."""
        now = time.monotonic()
        if self._task is not None:
            if now - self._since > _HANGS:
                self._judge(TimeoutError)
        elif self.ready is None or now - self._since > (_AGAIN[self.name] if self.ready else _AFTER_TROUBLE):
            self._since, self._task = now, asyncio.create_task(self._look())
        return self._task

    async def _look(self) -> None:
        trouble: type[BaseException] | str | None = None
        for look in self._looks:
            try:
                trouble = trouble or await look()
            except Exception as error:
                trouble = type(error)
        self._task = None
        self._judge(trouble)

    def _judge(self, trouble: type[BaseException] | str | None) -> None:
        was, self.ready = self.ready, not trouble
        if trouble and was is not False:
            words = trouble if isinstance(trouble, str) else f"{trouble.__module__}.{trouble.__qualname__}"
            logger.warning("not ready: %s (%s)", self._shown, words)
        elif not trouble and was is False:
            logger.warning("ready again: %s", self._shown)


class Readiness:
    """The parts of a chain.

    ``question`` is what the releases' models are asked, as requests give it; by default "ready?" under the store's
    input key and every key that the member's prompt names. ``where``: before a part's name in the log.
    """

    def __init__(
        self,
        releases: Sequence[AnyRelease],
        heads: Sequence[PrivateHead],
        question: Any = None,
        where: str = "",
    ) -> None:
        budgets = {id(release.budget): release.budget for release in releases}.values()
        stores = {id(release.store): release.store for release in releases}.values()
        looks: dict[str, list[Look]] = {
            "store": [partial(asyncio.to_thread, _read, store) for store in stores],
            "ledger": [partial(asyncio.to_thread, _lines, budget) for budget in budgets],
            "model": [
                *(partial(_model, each, question) for each in releases),
                *(partial(_head, each) for each in heads),
            ],
        }
        self.parts = [ReadyPart(name, some, where) for name, some in looks.items() if some]

    async def look(self) -> dict[str, bool]:
        """Every part by its last look. Those that are due are begun, and waited for a moment."""
        if due := [task for part in self.parts if (task := part.begin()) is not None]:
            await asyncio.wait(due, timeout=PATIENCE)
        return {part.name: part.ready is True for part in self.parts}


def _read(store: ExemplarStore) -> None:
    """Follow a store's file, or ask its server for what it remembers. The number of owners decides nothing."""
    store.refresh()
    _ = store.budgets


def _lines(budget: PrivacyBudget) -> None:
    budget.lines("ready?")


async def _model(release: AnyRelease, question: Any) -> type[BaseException] | None:
    if release.selector.nearest_to is not None:
        await release.store.aembed_query("ready?")
    return await arun(release.ask_model(question))


async def _head(head: PrivateHead) -> None:
    await head.ainvoke("ready?")

"""The metrics of `dpicl serve` for Prometheus: public quantities alone.

Every number follows from the requests, from answers that were given, or from clocks:

- Charges, replays and refusals repeat what each caller is told. A refusal's kind is the ``error`` of its answer.
- What is planned, spent and left is the ledger's count of charges. With owners' tickets only the questions are counted.
- A time is that of a step without private work: `release.check`, after the store was read; one transaction of the
  ledger, without the wait for another caller's equal question; the write of a receipt. Where owners pay with tickets,
  charge and receipt take longer the more owners pay, so neither is timed. No time spans a private call.
- The queue is what a client sees who asks at that moment.

Nothing else is here. A process's memory and processor time (the client library's own collectors) follow the private
work. Counters of buckets, owners, or votes before noise would be a release without noise.

Steps share cores and locks with the private work of other requests. A busy server's clocks and queue show that it is
busy, as its answers do to whoever times them: the guarantee does not cover timing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.calls.observing import Step
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.extras import require
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.serving.state import by_budget, unit_of

if TYPE_CHECKING:
    from prometheus_client import Metric

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder in which workers of one server share their counts. It must be set before the
client library is imported."""

_LINE = ("budget", "line")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """The counts of a server, and the observer of one worker's requests.

    Workers of one server share their counts through files, so each of them answers for all. What is left is read from
    the ledger, whoever else charges it.

    Parameters
    ----------
    principals
        Whether what is left on budgets with a counter for each caller has the callers' names. Without: a line's
        ``spent`` is of all callers together, and its ``left`` of the caller who has least.
    """

    def __init__(self, releases: Sequence[AnyRelease], *, principals: bool = False) -> None:
        prometheus: Any = require("prometheus_client", "serve")
        prometheus.disable_created_metrics()
        self._releases, self._folder = list(releases), os.environ.get(FOLDER)
        self._ledgers = _Ledgers(self._releases, principals)
        self._registry = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"registry": None if self._folder else self._registry}
        if not self._folder:
            self._registry.register(self._ledgers)
        self._charges = prometheus.Counter("dpicl_charges", "Releases charged.", _LINE, **own)
        self._replays = prometheus.Counter("dpicl_replays", "Answers from the ledger, at no cost.", _LINE, **own)
        self._refusals = prometheus.Counter("dpicl_refusals", "Answers that are errors.", ("error",), **own)
        self._took = {
            step: prometheus.Histogram(f"dpicl_{step}_seconds", words, buckets=_SECONDS, **own)
            for step, words in {
                "check": "Check of a request, after the store was read.",
                "charge": "One transaction that charges a request. Not timed if owners pay with tickets.",
                "receipt": "Write of one receipt. Not timed if owners pay with tickets.",
            }.items()
        }
        live: dict[str, Any] = {"multiprocess_mode": "livesum", **own}
        self._waiting = prometheus.Gauge("dpicl_queue_waiting", "Requests that wait for a slot.", **live)
        self._running = prometheus.Gauge("dpicl_queue_running", "Slots taken by releases under way.", **live)
        self._workers = prometheus.Gauge("dpicl_workers", "Processes that serve.", **live)

    def begin(self) -> None:
        """This worker serves from now on. Its plans are frozen, so its lines have names, and begin at 0."""
        self._workers.set(1)
        for release in self._releases:
            for counter in (self._charges, self._replays):
                counter.labels(release.budget.name, release.line().name)

    def took(self, step: Step, seconds: float) -> None:
        self._took[step].observe(seconds)

    def charged(self, budget: str, line: str, charges: int, replays: int) -> None:
        self._charges.labels(budget, line).inc(charges)
        self._replays.labels(budget, line).inc(replays)

    def queue(self, waiting: int, running: int) -> None:
        self._waiting.set(waiting)
        self._running.set(running)

    def refused(self, error: str) -> None:
        """A request got this error."""
        self._refusals.labels(error).inc()

    def shown(self, accept: str) -> tuple[bytes, str]:
        """All metrics of this server's workers, and their media type, in a format that ``accept`` allows. Blocks."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = self._registry
        if self._folder:
            registry = CollectorRegistry()
            registry.register(_Workers(Path(self._folder)))
            registry.register(self._ledgers)
        encode, media_type = choose_encoder(accept)
        return encode(registry), media_type


class _Workers:
    """The counts of the workers of one server, by their files.

    The counts of a worker that is gone stay. It has neither a queue nor a place among the workers any more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> list[Metric]:
        """The sums over the workers. Others may collect at the same time, and a worker may be about to begin."""
        multiprocess: Any = require("prometheus_client.multiprocess", "serve")
        for file in self._folder.glob("gauge_live*.db"):
            try:
                os.kill(int(re.sub(r"\D", "", file.stem)), 0)
            except OSError:  # no such process, or another user's by now
                file.unlink(missing_ok=True)
        begun = []
        for file in self._folder.glob("*.db"):
            with contextlib.suppress(FileNotFoundError):  # another worker has removed it
                if file.stat().st_size:  # else its worker has just made it
                    begun.append(str(file))
        return list(multiprocess.MultiProcessCollector.merge(begun))


class _Ledgers:
    """The figures of the ledgers, read at each scrape."""

    def __init__(self, releases: Sequence[AnyRelease], principals: bool) -> None:
        self._budgets = by_budget(releases) if releases else []
        self._principals = principals

    def collect(self) -> Iterator[Metric]:
        """Counts of each line, and whether the ledgers could be read."""
        from prometheus_client.core import GaugeMetricFamily

        labels = (*_LINE, "unit", *(["principal"] if self._principals else []))
        planned = GaugeMetricFamily("dpicl_line_planned", "What a line is for, or each caller's.", labels=labels)
        spent = GaugeMetricFamily("dpicl_line_spent", "What is charged on a line.", labels=labels)
        left = GaugeMetricFamily(
            "dpicl_line_left", "What is left of a line, or of the caller with least.", labels=labels
        )
        readable = GaugeMetricFamily("dpicl_ledger_up", "Whether a budget's ledger can be read.", labels=["budget"])
        for releases in self._budgets:
            name = releases[0].budget.name
            try:
                for line, who, *counts in self._counts(releases):
                    row = [name, line.name, unit_of(line.mechanism), *([who] if self._principals else [])]
                    for family, count in zip((planned, spent, left), counts, strict=True):
                        if count is not None:
                            family.add_metric(row, count)
            except LedgerError:
                readable.add_metric([name], 0)
            else:
                readable.add_metric([name], 1)
        yield from (planned, spent, left, readable)

    def _counts(self, releases: Sequence[AnyRelease]) -> Iterator[Any]:
        """Each line of a budget with a principal ("": all), what is planned, spent and left; None: not known."""
        budget = releases[0].budget
        lines = {line.name: line for line in (release.line() for release in releases)}
        spent: dict[str, dict[str, int]]
        if budget.scope == "shared":
            spent = {"": {name: state["spent"] for name, state in budget.lines().items()}}
        else:
            spent = budget.principals()
        for name, line in lines.items():
            counts = {who: found.get(name, 0) for who, found in spent.items()}
            if not self._principals:
                most = max(counts.values(), default=0)
                left = None if budget.tickets else line.count - most
                yield line, "", None if budget.tickets else line.count, sum(counts.values()), left
                continue
            for who, count in counts.items():
                if budget.tickets:
                    yield line, who, None, count, None
                else:
                    yield line, who, line.count, count, line.count - count

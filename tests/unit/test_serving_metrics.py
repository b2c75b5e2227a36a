"""`serving.metrics`: what Prometheus is told, to whom, and that it does not depend on any one owner.

Two stores that differ in one owner are served with the same coins and the same noise. All metrics must then be equal,
but the readings of clocks: the sums and the buckets of the histograms of seconds. How many readings there were must be
equal too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.runnables import RunnableLambda
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.parser import text_string_to_metric_families

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.calls import observing
from langchain_dpicl.release import transaction
from langchain_dpicl.serving import app as serving_app
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import Configuration
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.serving.metrics import _Workers

Make = Callable[..., Any]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

KEYS = {name: new_key() for name in ("alice", "bob", "prometheus")}
ODD = "owner-odd"


def member(values: dict[str, Any]) -> str:
    """Fails on the odd owner's records: its presence makes a member abstain, and a bucket larger."""
    if any(ODD in example["input"] for example in values["examples"]):
        raise RuntimeError
    return "Positive"


def app_of(release: Any, **settings: Any) -> Any:
    keys = {name: hash_of(KEYS[name]) for name in ("alice", "bob")}
    metrics = {"key": hash_of(KEYS["prometheus"]), **settings}
    return create_app(Configuration(chain="its:own", keys=keys, metrics=metrics), release)  # type: ignore[arg-type]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def scraped(client: TestClient) -> Samples:
    """All samples but the readings of clocks."""
    answer = client.get("/metrics", headers=bearer("prometheus"))
    assert answer.status_code == 200, answer.text
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            is_reading = sample.name.endswith("_seconds_sum") or sample.labels.get("le", "+Inf") != "+Inf"
            if not (family.name.endswith("_seconds") and is_reading):
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the epsilons of later receipts."""
    monkeypatch.setattr(serving_app, "warm", serving_app.freeze)


@pytest.fixture
def release_of(records: Make, store_of: Make, owner_keyed: Make, seeded: Make, tmp_path: Path) -> Make:
    """release_of(extra): over 24 owners, and one more if ``extra``; 6 answers, or as many tickets for each owner."""

    def make(extra: bool, *, tickets: bool = False, **options: Any) -> Any:
        rows = records(24)
        if extra:
            rows += [{"input": f"{ODD} {i}", "output": "Negative", "owner": ODD} for i in range(3)]
        store = store_of(rows)
        gate: dict[str, Any] = {"threshold": -1.0, "eligible": 24, "nearest_to": "input"} if tickets else {}
        selector = PoissonExampleSelector(store, 6, rate=0.7, max_exemplars=24, **gate)
        ledger = f"sqlite:///{tmp_path}/{len(list(tmp_path.iterdir()))}.db"
        about = {"name": "tried", "accept_noise": True, "tickets": tickets, **options}
        budget = PrivacyBudget(1000, 1e-5, 6, ledger, **about)
        vote = NoisyVote(["Positive", "Negative"], mechanism="vote")
        made: Any = PrivateEnsemble(selector, RunnableLambda(member)) | DPAggregate(vote, budget)
        made.selector._randomness, made._randomness = owner_keyed(store, 1), seeded(2)
        return made

    return make


def used(release: Any) -> Samples:
    """The metrics after answers, replays, refusals, a batch, a stream and a look at readiness."""
    with TestClient(app_of(release)) as client:
        for question in ("one", "two", "one", "three", None):
            client.post(
                "/answer/invoke",
                json={"input": {"input": question or "x", **({} if question else {"examples": []})}},
                headers=bearer("alice"),
            )
        client.post(
            "/answer/batch",
            json={"inputs": [{"input": "four"}, {"input": "four"}, {"input": "one"}]},
            headers=bearer("bob"),
        )
        client.post("/answer/stream", json={"input": {"input": "five"}}, headers=bearer("bob"))
        client.post("/answer/batch", json={"inputs": [{"input": "6"}, {"input": "7"}]}, headers=bearer("bob"))
        client.post("/answer/invoke", content=b"no JSON", headers=bearer("bob"))
        client.get("/answer/budget")
        assert client.get("/ready").status_code == 200
        return scraped(client)


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize("tickets", [False, True])
def test_one_owner_more_changes_no_metric(release_of: Make, tickets: bool) -> None:
    less, more = (used(release_of(extra, tickets=tickets)) for extra in (False, True))
    assert less == more
    line = {"budget": "tried", "line": "vote"}
    charged = 7 if tickets else 5
    assert value(less, "dpicl_charges_total", **line) == charged, "one, two, three, four, five; with tickets 6 and 7"
    assert value(less, "dpicl_replays_total", **line) == 3, "one, four in the batch, one in the batch"
    assert value(less, "dpicl_refusals_total", error="PrivacyBudgetExceeded") == (None if tickets else 1)
    assert value(less, "dpicl_refusals_total", error="InvalidInput") == 1
    assert value(less, "dpicl_refusals_total", error="InvalidParameter") == 1
    assert value(less, "dpicl_refusals_total", error="Unauthorized") == 1
    assert value(less, "dpicl_line_spent", unit="releases", **line) == charged
    assert value(less, "dpicl_line_left", unit="releases", **line) == (None if tickets else 1)
    assert value(less, "dpicl_check_seconds_count") == 10
    assert value(less, "dpicl_receipt_seconds_count") == (0 if tickets else 5), "of tickets nothing private is timed"
    assert (value(less, "dpicl_charge_seconds_count") == 0) == tickets
    assert value(less, "dpicl_queue_running") == value(less, "dpicl_queue_waiting") == 0


def test_what_counts_owners_is_caught(release_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the server also hears how many owners were sampled."""
    counted: dict[str, int] = {}

    def hear(release: Any) -> Any:
        draw = release.selector._randomness.coin_positions

        def drawn(n: int, probability: float) -> Any:
            heads = draw(n, probability)
            counted["owners"] = len(heads)
            return heads

        release.selector._randomness.coin_positions = drawn
        return release

    tell = transaction._tell

    def told(watching: Any, release: Any, line: Any, entries: Any) -> None:
        tell(watching, release, line, entries)
        watching.charged("owners", "sampled before", counted.get("owners", 0), 0)

    monkeypatch.setattr(transaction, "_tell", told)
    assert used(hear(release_of(False))) != used(hear(release_of(True)))


@pytest.mark.filterwarnings("ignore:delta")
def test_its_clean_context_keeps_a_ticket_charge_from_being_timed(
    release_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = release_of(False, tickets=True)
    heard: list[str] = []
    watching = SimpleNamespace(took=lambda step, seconds: heard.append(step))
    with TestClient(app_of(release)) as client:
        monkeypatch.setattr("langchain_dpicl.budget.line.observer", lambda: watching)
        client.post("/answer/invoke", json={"input": {"input": "one"}}, headers=bearer("alice"))
    assert heard == ["charge"], "its context alone keeps it from the observer: the step is the same"


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize("tickets", [False, True])
def test_private_work_finds_no_observer(release_of: Make, tickets: bool) -> None:
    release = release_of(False, tickets=tickets)
    found: list[Any] = []
    aggregator, draw = release.aggregator, release.selector._randomness.coin_positions

    class Seeing:
        """The aggregator's generator."""

        def __getattr__(self, name: str) -> Any:
            found.append(observing.observer())
            return getattr(seeded, name)

    def coins(n: int, probability: float) -> Any:
        found.append(observing.observer())
        return draw(n, probability)

    seeded, release._randomness, release.selector._randomness.coin_positions = release._randomness, Seeing(), coins
    with TestClient(app_of(release)) as client:
        answered = client.post("/answer/invoke", json={"input": {"input": "one"}}, headers=bearer("alice"))
    assert answered.json()["output"] in aggregator.labels
    assert len(found) >= 2
    assert set(found) == {None}


def test_only_its_own_key_opens_the_metrics(release_of: Make) -> None:
    with TestClient(app_of(release_of(False))) as client:
        for headers in ({}, bearer("alice"), {"authorization": "Bearer no"}):
            refused = client.get("/metrics", headers=headers)
            assert refused.status_code == 401
            assert set(refused.json()) == {"error", "message"}
        assert client.post("/answer/invoke", json={}, headers=bearer("prometheus")).status_code == 401
    bare = Configuration(chain="its:own", keys={"alice": hash_of(KEYS["alice"])})
    with TestClient(create_app(bare, release_of(False))) as client:
        assert client.get("/metrics", headers=bearer("alice")).status_code == 404
    with pytest.raises(InvalidParameter, match=r"metrics\.key"):
        create_app(bare.model_copy(update={"metrics": Configuration(metrics={}).metrics}), release_of(False))  # type: ignore[arg-type]


def test_an_anonymous_server_shows_them_to_this_machine(release_of: Make) -> None:
    local = Configuration(chain="its:own", server={"anonymous": True}, metrics={})  # type: ignore[arg-type]
    app = create_app(local, release_of(False, replay=True))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/metrics").status_code == 200
    with TestClient(app, base_url="http://evil.example") as client:
        assert client.get("/metrics").status_code == 401


@pytest.mark.parametrize("named", [False, True])
def test_callers_with_counters_are_named_only_if_that_is_asked_for(release_of: Make, named: bool) -> None:
    release = release_of(False, scope="per_principal")
    with TestClient(app_of(release, principals=named)) as client:
        none = scraped(client)
        for name, count in (("alice", 2), ("bob", 1)):
            for i in range(count):
                client.post("/answer/invoke", json={"input": {"input": f"{i}"}}, headers=bearer(name))
        found = scraped(client)
        text = client.get("/metrics", headers=bearer("prometheus")).text
    line = {"budget": "tried", "line": "vote", "unit": "releases"}
    assert ("alice" in text) == named
    if named:
        assert value(found, "dpicl_line_left", principal="alice", **line) == 4
        assert value(found, "dpicl_line_left", principal="bob", **line) == 5
    else:
        assert value(none, "dpicl_line_left", **line) == 6, "of whoever comes first"
        assert value(found, "dpicl_line_left", **line) == 4, "of the caller with least"
        assert value(found, "dpicl_line_spent", **line) == 3, "of all callers"


def test_metrics_stay_without_their_ledger(release_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    release = release_of(False)
    with TestClient(app_of(release)) as client:
        client.post("/answer/invoke", json={"input": {"input": "one"}}, headers=bearer("alice"))
        Path(release.budget._ledger.path).unlink()
        found = scraped(client)
    assert value(found, "dpicl_ledger_up", budget="tried") == 0
    assert value(found, "dpicl_charges_total", budget="tried", line="vote") == 1
    assert not [name for name, _ in found if name.startswith("dpicl_line_")]


def test_nothing_of_the_process_is_shown(release_of: Make) -> None:
    """Memory and processor time follow private work."""
    with TestClient(app_of(release_of(False))) as client:
        text = client.get("/metrics", headers={**bearer("prometheus"), "accept": "application/openmetrics-text"}).text
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert all(name.startswith("dpicl_") for name in names)
    assert "_created" not in text


def test_a_worker_that_begins_or_is_gone_fails_no_scrape(tmp_path: Path) -> None:
    """One that begins has an empty file for a moment. One that is gone has charges that count, and no queue."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for kind, name, worker in (("counter", "a_total", gone.pid), ("gauge_livesum", "b", gone.pid), ("counter", "c", 1)):
        file = tmp_path / f"{kind}_{worker}.db"
        if name == "c":
            file.touch()
        else:
            values = MmapedDict(str(file))
            values.write_value(mmap_key(name.removesuffix("_total"), name, [], [], "words"), 3.0, 0.0)
            values.close()
    for _ in range(2):
        (found,) = _Workers(tmp_path).collect()
        assert [(each.name, each.value) for each in found.samples] == [("a_total", 3.0)]

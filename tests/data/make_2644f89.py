"""Make the files in tests/data/2644f89, ledgers with their witnesses and configurations, by the release of 2644f89.

    git worktree add ../old 2644f89
    PYTHONPATH=../old .venv/bin/python tests/data/make_2644f89.py tests/data/2644f89

`chains` works with today's code too: the tests ask the same questions again. Every record is made up.

- ledger.sqlite: a vote, two structured answers (one with means, one with a call for every owner), a budget for each
  caller, one whose owners pay with tickets, and a fresh start on other data.
- free.sqlite: a budget without a plan (`PrivacyBudget.filtered`) beside a vote.
- killed.sqlite: a vote whose process was killed, with permits in hand.
- tickets.sqlite: three budgets whose owners pay (of votes, of tokens, for each caller), with rows that are added up,
  tokens that were given back, an owner who was forgotten and one whose forgetting was interrupted, and a process that
  was killed when the witness knew its charge and the ledger did not.
- named.npz and unnamed.npz: stores with and without a key of owners, with forgotten owners, and budgets and releases
  that they remember.
- expected.json: what that release said of them.

With names of ledgers, or "stores", behind the folder, only these are made anew. The stores of 825a692 are made so too:

    PYTHONPATH=../other .venv/bin/python tests/data/make_2644f89.py tests/data/825a692 stores
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    Structured,
    acting_for,
)

LABELS = ["Positive", "Negative"]
QUESTION = {"input": "what does text 3 say?"}
OTHER = {"input": "what does text 4 say?"}


class Visit(BaseModel):
    """A made-up answer: two votes, a median and a mean."""

    urgent: bool
    age: int = Field(ge=0, le=100)
    score: float = Field(ge=0.0, le=1.0)
    room: int | None = Field(ge=1, le=9)


def label(values: Any) -> str:
    """The label of the first example."""
    return str(values["examples"][0]["output"]) if values["examples"] else "Positive"


def visit(values: Any) -> dict[str, Any]:
    """The same for each call."""
    return {"urgent": True, "age": 40, "score": 0.25, "room": 3}


def store_of(first: int = 0, owners: int = 60) -> Any:
    """Made-up texts, of these owners."""
    rows = [
        {"input": f"text {i}", "output": LABELS[i % 2], "owner": f"owner-{i}"} for i in range(first, first + owners)
    ]
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=16), owner_key="owner")


def chains(url: str) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """The budgets of ledger.sqlite by name: each opens its budget, with the chain that asks it."""

    def made(name: str, aggregator: Any, member: Any, of: dict[str, Any], first: int = 0, **how: Any) -> Any:
        budget = PrivacyBudget(3.0, 1e-5, how.pop("releases", 40), url, name, accept_noise=True, **how)
        if name == "afresh" and hasattr(budget, "start_afresh") and not budget.is_frozen:
            budget.start_afresh("the desk moved to another town")
        ensemble = PrivateEnsemble(PoissonExampleSelector(store_of(first), **of), RunnableLambda(member))
        return budget, ensemble | DPAggregate(aggregator, budget, return_receipt=True)

    def vote() -> Any:
        return NoisyVote(LABELS, mechanism="vote")

    shared = {"members": 10, "rate": 0.5, "max_exemplars": 60}
    gated = {"members": 10, "rate": 0.5, "threshold": -1.0, "eligible": 60, "nearest_to": "input"}
    return {
        "votes": lambda: made("votes", vote(), label, shared),
        "visits": lambda: made("visits", Structured(Visit, means=["score"], weights={"age": 2.0}), visit, shared),
        "calls": lambda: made("calls", Structured(Visit), visit, {"calls": 20}),
        "callers": lambda: made("callers", vote(), label, shared, scope="per_principal"),
        "tickets": lambda: made("tickets", vote(), label, gated, releases=5, tickets=True),
        "afresh": lambda: made("afresh", vote(), label, shared, first=1000),
    }


def asked(chain: Any, question: dict[str, str], caller: str | None = None) -> dict[str, Any]:
    """An answer with its receipt, as JSON holds it."""
    if caller is None:
        found = chain.invoke(question)
    else:
        with acting_for(caller):
            found = chain.invoke(question)
    answer = found["answer"]
    return {
        "answer": answer.model_dump() if isinstance(answer, BaseModel) else answer,
        "number": found["receipt"]["number"],
        "replayed": found["receipt"]["replayed"],
        "id": found["receipt"]["id"],
    }


def state(budget: Any) -> dict[str, Any]:
    """The numbers of a budget."""
    if budget.scope == "per_principal":
        callers = sorted(budget.principals())
        return {
            "spent": {who: budget.principals()[who] for who in callers},
            "epsilon": {who: budget.epsilon_spent(who) for who in callers},
        }
    return {
        "spent": {line: about["spent"] for line, about in budget.lines().items()},
        "epsilon": budget.epsilon_spent(),
    }


def fill(url: str) -> dict[str, Any]:
    """Ask the questions of ledger.sqlite."""
    expected: dict[str, Any] = {"budgets": {}, "totals": {}}
    for name, make in chains(url).items():
        budget, chain = make()
        callers = ["ann", "bob"] if name == "callers" else [None]
        first = asked(chain, QUESTION, callers[0])
        again = asked(chain, QUESTION, callers[0])
        assert again["replayed"]
        asked(chain, OTHER, callers[-1])
        expected["budgets"][name] = {**state(budget), "first": first, "caller": callers[0]}
        total = budget.total()
        expected["totals"][name] = {key: total[key] for key in ("epsilon", "promised_epsilon", "delta")}
        budget.close()
    return expected


def fill_free(url: str) -> dict[str, Any]:
    """A budget without a plan, with two charges, beside a vote."""
    budget = PrivacyBudget.filtered(2.0, 1e-5, url, "free")
    selector = PoissonExampleSelector(store_of(), 10, rate=0.5, max_exemplars=60)
    ensemble = PrivateEnsemble(selector, RunnableLambda(label))
    chain = ensemble | DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget, noise=40.0, return_receipt=True)
    first = asked(chain, QUESTION)
    asked(chain, OTHER)
    told = {"spent": {"vote": budget.spent()}, "epsilon": budget.epsilon_spent(), "first": first}
    budget.close()
    budget, chain = chains(url)["votes"]()
    first = asked(chain, QUESTION)
    expected = {"free": told, "votes": {**state(budget), "first": first, "caller": None}}
    budget.close()
    return expected


def fill_killed(url: str) -> dict[str, Any]:
    """A ledger whose process was killed."""
    done = subprocess.run([sys.executable, __file__, "--killed", url], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return {"large": json.loads(done.stdout)}


def fill_and_be_killed(url: str) -> None:
    """Charge a large line until permits are granted ahead, say what was charged, and be killed."""
    budget = PrivacyBudget(3.0, 1e-5, 4000, url, "large", accept_noise=True)
    selector = PoissonExampleSelector(store_of(), 10, rate=0.5, max_exemplars=60)
    ensemble = PrivateEnsemble(selector, RunnableLambda(label))
    chain = ensemble | DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget)
    for i in range(12):
        chain.invoke({"input": f"question {i}"})
    print(json.dumps(state(budget)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


PAYING = {"few": ("vote", 5, None), "talk": ("tokens", 20, None), "desk": ("vote", 2, "ann")}
"""The budgets of tickets.sqlite: line, tickets, caller."""
TOKENS = 5
OWNERS = 12
FORGOTTEN, HELD = "owner-3", "owner-7"


def paying(url: str, name: str, **how: Any) -> tuple[Any, Any]:
    """A budget whose owners pay, and its line."""
    line, tickets, caller = PAYING[name]
    scope = "per_principal" if caller else "shared"
    budget = PrivacyBudget(1000, 1e-3, tickets, url, name, tickets=True, replay=False, scope=scope, **how)
    return budget, budget.line(line, 0.5)


def charged(line: Any, store: Any, near: list[int], caller: str | None = None) -> tuple[Any, list[str]]:
    """Charge a query that finds these owners of `store_of`: the charge, and the owners who pay."""
    from langchain_dpicl.budget.line import IN_TRANSACTION
    from langchain_dpicl.calls.flow import run

    by_number = owners_of(store)
    wanted = {f"owner-{i}" for i in near}
    numbers = [number for number, name in by_number.items() if name in wanted]
    owners = [line.ask(store, np.array(numbers, np.int64))]
    units = TOKENS if line.name == "tokens" else 1
    (charge,) = run(line.charging(IN_TRANSACTION, [None], caller, units=units, owners=owners))
    return charge, sorted(by_number[number] for number in charge.participants.take().tolist())


def owners_of(store: Any) -> dict[int, str]:
    """The owners who are in a store, by number."""
    with store.reading() as view:
        rows, position = view.rows_of(view.numbers)
        names = [each.owner for each in view.records(rows)]
        return dict(zip(view.numbers[position].tolist(), names, strict=True))


def near(question: int) -> list[int]:
    """The owners who are eligible for a made-up question."""
    return [i for i in range(OWNERS) if (5 * i + question * question) % 7 < 3]


def probes(url: str, **how: Any) -> Iterator[list[str]]:
    """The owners who pay for each of the next questions, in every budget, until nobody has a ticket."""
    store = store_of(owners=OWNERS)
    for name, (_, _, caller) in PAYING.items():
        budget, line = paying(url, name, **how)
        for who in (caller, f"{caller}a") if caller else (None,):
            for question in range(14):
                yield charged(line, store, near(question), who)[1]
        budget.close()


def fill_tickets(url: str) -> dict[str, Any]:
    """Let owners pay, in every way, and say what they have left by what they can still pay."""
    from langchain_dpicl.budget import tickets as of_release

    of_release.SUM_AFTER = 4
    store = store_of(owners=OWNERS)
    for name, (_, _, caller) in PAYING.items():
        budget, line = paying(url, name)
        budget.watch(store)
        for question in range(7 if name == "few" else 4):
            charge, _ = charged(line, store, near(question), caller)
            if name == "talk":
                line.record(charge, unused=question)
        if name == "talk":
            charged(line, store, [0])  # gives back what the charges before it left
        if name == "few":
            store.forget(FORGOTTEN)
        held = [number for number, owner in owners_of(store).items() if owner == HELD]
        with store.reading() as view:
            (mark,) = view.marks(np.array(held, np.int64), budget._ledger.key("fingerprint_key"))
        line.tickets.index.leave(mark)  # and is killed before the store lets the owner go
        budget.close()
    done = subprocess.run([sys.executable, __file__, "--killed-tickets", url], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(url.removeprefix("sqlite:///"), folder)
        shutil.copy(f"{url.removeprefix('sqlite:///')}.witness", folder)
        return {"probes": [*probes(f"sqlite:///{copy}")]}


def charge_and_be_killed(url: str) -> None:
    """Be killed between the witness's COMMIT and the ledger's."""
    from langchain_dpicl.budget import opening

    honest = opening.Permits.swap

    def swap(*args: Any) -> Any:
        honest(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    opening.Permits.swap = swap
    charged(paying(url, "few")[1], store_of(owners=OWNERS), near(1))


STORES = ("named", "unnamed")
KEY = b"k" * 32
LEFT = {"named": ["owner-3", "owner-5"], "unnamed": ["#6"]}
"""The owners who are forgotten in each store."""


def fill_stores(folder: Path) -> dict[str, Any]:
    """Make the stores, and say what a reading tells of them."""
    from langchain_core.documents import Document

    try:
        from langchain_dpicl.store.notes import OpenedBudget as opened
    except ImportError:
        from langchain_dpicl.store.base import OpenedBudget as opened

    said: dict[str, Any] = {}
    model = DeterministicFakeEmbedding(size=16)
    for name in STORES:
        owner = {"owner_key": "owner"} if name == "named" else {}
        rows = [{"input": f"text {i}", "output": LABELS[i % 2], "owner": f"owner-{i % 7}"} for i in range(12)]
        if name == "unnamed":
            rows = [{"input": f"text {i // 2}", "output": "Positive"} for i in range(12)]
        store = ExemplarStore.from_records(rows, model, ids=range(0, 24, 2), **owner)
        about = {"output": "Positive", **({"owner": "owner-8"} if owner else {})}
        store.maintenance().add_documents([Document("a document", metadata=about)], ids=["doc-\ud800"])
        (folder / f"{name}.npz").unlink(missing_ok=True)
        store.save(folder / f"{name}.npz")
        store.remember_budget(opened("f" * 32, "sqlite:///ledger.db", "votes"))
        if name == "named" and hasattr(store, "keep_notes"):
            store.keep_notes(folder / "named.csv.dpicl")
            store.remember_budget(opened("e" * 32, "sqlite:///other.db", "head", 1.5, 1e-6))
        store.remember_release("a head (made up)")
        for left in LEFT[name]:
            store.forget(left)
        store.add([{**rows[0], "input": "a later text"}])
        store.save(folder / f"{name}.npz")
        said[name] = told(store)
    return said


def told(store: Any) -> dict[str, Any]:
    """All that a store says of its records."""
    from dataclasses import astuple

    found: dict[str, Any] = {"lineage": store.lineage, "owners": list(store.owners)}
    found["keys"] = [store.input_key, store.output_key, store.owner_key]
    with store.reading() as view:
        rows, position = view.rows_of(view.numbers)
        held = view.records(rows)
        found["records"] = [[each.document, each.content.decode(), each.owner] for each in held]
        found["vectors"] = [row.tobytes().hex() for row in view.vectors(rows)]
        found["marks"] = [mark.hex() for mark in view.marks(view.numbers, KEY) if mark]
        names = {number: each.owner for number, each in zip(view.numbers[position].tolist(), held, strict=True)}
        found["near"] = [
            [names[number] for number in view.eligible(store.embed_query(text), threshold).tolist()]
            for text in ("text 4", "a document", "another question")
            for threshold in (-0.1, 0.1, 0.9)
        ]
    was_forgotten = store._forgotten()
    named = [owner for owner in ("owner-3", "owner-4", "owner-5") if was_forgotten(owner.encode(), True)]
    contents = [b'{"input":"text %d","output":"Positive"}' % i for i in range(6)]
    found["forgotten"] = named + [each.decode() for each in contents if was_forgotten(each, False)]
    found["budgets"] = [[*astuple(each), None, None][:5] for each in store.budgets]
    found["releases"] = list(store.released_once)
    return found


MODEL = """\
model:
  url: http://127.0.0.1:8080/v1   # one server
  name: tiny
"""
YAML = f"""\
# A made-up desk. Its records stand elsewhere.
store:    {{data: desk.jsonl, input_key: text, output_key: label}}
{MODEL}release:
%s
selector: {{members: 10, shots: 4}}
budget:   {{epsilon: 3, delta: 1.0e-5, releases: 100, ledger: "sqlite:///ledger.sqlite"}}

keys:     # a name, and the hash of its key
  desk: "0000000000000000000000000000000000000000000000000000000000000000"
"""
TOML = """\
# A made-up desk. Its records stand elsewhere.
[store]
data = "desk.jsonl"
input_key = "text"
output_key = "label"

%s
[selector]
members = 10

[budget]
epsilon = 3
delta = 1e-5
releases = 100
ledger = "sqlite:///ledger.sqlite"   # relative to this file

[keys]
desk = "0000000000000000000000000000000000000000000000000000000000000000"
"""
RELEASES = {
    "label_vote": ("  kind: label_vote\n  labels: [billing, technical]", 'kind = "label_vote"\nlabels = ["a", "b"]'),
    "candidate_vote": (
        "  kind: 'candidate_vote'   # not embedding\n  candidates: [yes it is, no it is not]",
        'kind = \'candidate_vote\'   # not embedding\ncandidates = ["yes", "no"]',
    ),
    "keywords_joint": (
        "  {kind: keywords_joint, k: 3, domain: [cold, warm, wet, dry]}",
        'kind = "keywords_joint"\nk = 3',
    ),
    "keywords_ptr": ('  {k: 3, kind: "keywords_ptr"}', 'k = 3\nkind = "keywords_ptr"'),
    "scores": (
        "  kind: scores   # noisy counts\n  labels: [billing, technical]",
        'kind = "scores"   # noisy counts\nlabels = ["a", "b"]',
    ),
}


def write_configurations(folder: Path) -> None:
    """A server's file for every kind that has another name today; the release of 2644f89 reads each."""
    from langchain_dpicl.serving import config

    data = folder / "desk.jsonl"  # that it is there is looked for
    data.touch()
    for kind, (in_yaml, in_toml) in RELEASES.items():
        written = {
            "yaml": (YAML.replace(MODEL, "") if kind == "label_vote" else YAML) % in_yaml,
            "toml": TOML % f"[release]\n{in_toml}\n",
        }
        for ending, content in written.items():
            path = folder / f"{kind}.{ending}"
            path.write_text(content)
            config.read(path)
    data.unlink()


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fill_by_name: dict[str, Callable[[str], Any]] = {
        "ledger": fill,
        "free": fill_free,
        "killed": fill_killed,
        "tickets": fill_tickets,
        "stores": lambda _: fill_stores(folder),
    }
    for old in folder.iterdir():
        if not names or old.name.partition(".")[0] in names:
            old.unlink()
    warnings.simplefilter("ignore")
    known = folder / "expected.json"
    expected: dict[str, Any] = json.loads(known.read_text()) if names and known.exists() else {}
    for name in names or fill_by_name:
        expected[name] = fill_by_name[name](f"sqlite:///{folder / name}.sqlite")
    known.write_text(json.dumps(expected, indent=1) + "\n")
    if not names:
        write_configurations(folder)
    for name in set(names or fill_by_name) - {"stores"}:  # without a log beside it
        connection = sqlite3.connect(folder / f"{name}.sqlite")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
        connection.close()
    for empty in [*folder.glob("*.lock"), *folder.glob("*-journal")]:
        empty.unlink()


if __name__ == "__main__":
    import make_2644f89  # the name of `Visit` is a part of what a replay compares

    if sys.argv[1].startswith("--"):
        warnings.simplefilter("ignore")
        killed = {"--killed": "fill_and_be_killed", "--killed-tickets": "charge_and_be_killed"}
        getattr(make_2644f89, killed[sys.argv[1]])(sys.argv[2])
    make_2644f89.main(Path(sys.argv[1]).absolute(), sys.argv[2:])

"""How right a label vote is: owners' own labels behind a gate, without a model, exactly.

    python examples/studies/label_votes.py --task trec=train.jsonl:test.jsonl --output results/label-votes --choose
    python examples/studies/label_votes.py --task trec=train.jsonl:test.jsonl --output results/label-votes

Each record of the first file is its own owner. As in the study of heads, 500 of them, drawn by a fixed seed, give up
their labels and are public texts. The gate lets in the owners whose similarity to the question reaches what a share of
the public texts reaches; all of these who still hold a ticket use it and vote (a rate of 1). The gate compares texts,
or texts and their first two words (unit vectors of MiniLM, joined). `--choose` picks gate, share and tickets for each
epsilon on 1,000 of the owners' own texts, each asked without its own record, and keeps them in OUTPUT/settings.json; it
reads no test question. Without it the test questions are asked with these settings. No coin and no noise is drawn: the
probability of the right label follows from the votes, and votes and tickets from the order of the questions.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from head_study import Data, Known, Rows, loaded, task_options
from numpy.typing import NDArray
from scipy.special import softmax

from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.choice import usual_most
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
SHARES = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.15, 0.25)
TICKETS = (5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 400)
ORDERS = 4
TEXTS, WORDS = "texts", "texts and first two words"

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """A stream of questions: which they are, and what their vectors and right labels are.

    ``own`` says which owner each question was taken from, and is asked without; None if from nobody.
    """

    which: Ints
    vectors: NDArray[np.float32]
    right: list[str]
    own: Ints | None = None

    @classmethod
    def of(cls, rows: Rows, among: Ints, questions: int, seed: int, own: bool = False) -> Asked:
        """So many questions: all of them in random order, and again in another until they are enough."""
        randomness, count = np.random.default_rng(seed), math.ceil(questions / len(among))
        which = np.concatenate([randomness.permutation(among) for _ in range(count)])[:questions]
        return cls(which, rows.vectors[which], [rows.labels[i] for i in which], which if own else None)


def let_in(
    owners: Rows, asked: Asked, public: Rows, shares: Sequence[float]
) -> Iterator[tuple[float, NDArray[np.bool_]]]:
    """For each share, which owners the gate lets in for each question."""
    near, known = asked.vectors @ owners.vectors.T, asked.vectors @ public.vectors.T
    if asked.own is not None:
        near[np.arange(len(near)), asked.own] = -np.inf
    for share in shares:
        yield share, near >= np.quantile(known, 1.0 - share, axis=1)[:, None]


def counts(eligible: NDArray[np.bool_], owners: Rows, labels: list[str], tickets: int | None) -> Floats:
    """The votes on every question of a stream, one column for each label. An owner votes while it has tickets."""
    if tickets is not None:
        eligible = eligible & (np.cumsum(eligible, axis=0, dtype=np.int32) <= tickets)
    return np.asarray(eligible @ (np.array(owners.labels)[:, None] == np.array(labels)).astype(np.float32), np.float64)


def chances(votes: Floats, noise: VoteNoise | None, members: int, right: list[str], labels: list[str]) -> Floats:
    """The probability of the right label on every question; without noise a tie counts as its share."""
    if noise is None:
        weights = (votes == votes.max(axis=1, keepdims=True)).astype(np.float64)
        found = weights / weights.sum(axis=1, keepdims=True)
    else:  # the outcome "members abstain" has its penalty, since nobody abstains here
        silent = np.full((len(votes), 1), -noise.rate * noise.abstention_count(members, len(labels)))
        found = softmax(np.hstack([noise.rate * votes, silent]), axis=1)
    return np.asarray(found[np.arange(len(votes)), [labels.index(each) for each in right]])


@cache
def noise_of(epsilon: float, tickets: int) -> VoteNoise:
    """The exponential vote's, by the product's own plan."""
    request = LineRequest(EXPONENTIAL, 1.0, tickets, options={"own_calls": 1.0})
    line = PrivacyPlan.alone(request, epsilon=epsilon, delta=DELTA)
    return VoteNoise(EXPONENTIAL, line.parameter, own_calls=True)


def tried(data: Data, gate: str, questions: int) -> Iterator[dict[str, Any]]:
    """Every setting with this gate, and its share of right answers on owners' own texts."""
    owners = data.private
    asked = Asked.of(owners, np.random.default_rng(1).permutation(len(owners))[:questions], questions, seed=2, own=True)
    for share, eligible in let_in(owners, asked, data.public, SHARES):
        enough = [tickets for tickets in TICKETS if share * questions <= tickets < questions]
        for tickets in (None, *enough, questions):
            votes = counts(eligible, owners, data.labels, tickets)
            for epsilon in (None,) if tickets is None else EPSILONS:
                noise = None if epsilon is None or tickets is None else noise_of(epsilon, tickets)
                found = chances(votes, noise, usual_most(share * len(owners)), asked.right, data.labels)
                setting = {"epsilon": epsilon, "gate": gate, "share": share, "tickets": tickets}
                yield {**setting, "development": float(found.mean())}


def chosen(gates: dict[str, Data], questions: int) -> list[dict[str, Any]]:
    """The best settings for each epsilon: of all, and of those with as many tickets as questions."""
    rows = [row for gate, data in gates.items() for row in tried(data, gate, questions)]
    found = []
    for epsilon in (None, *EPSILONS):
        some = [row for row in rows if row["epsilon"] == epsilon]
        for among in (some, [row for row in some if row["tickets"] == questions]):
            found += [max(among, key=lambda row: row["development"])] if among else []
    return found


def measured(gates: dict[str, Data], setting: dict[str, Any], questions: int) -> dict[str, Any]:
    """A setting's share of right answers on the test questions, in several orders."""
    data, epsilon, tickets = gates[setting["gate"]], setting["epsilon"], setting["tickets"]
    owners, tests = data.private, data.tests
    noise = None if epsilon is None else noise_of(epsilon, tickets)
    sums, times, eligible = np.zeros(len(tests)), np.zeros(len(tests)), 0.0
    for order in range(ORDERS):
        asked = Asked.of(tests, np.arange(len(tests)), questions, seed=order)
        ((_, near),) = let_in(owners, asked, data.public, [setting["share"]])
        votes = counts(near, owners, data.labels, tickets)
        found = chances(votes, noise, usual_most(setting["share"] * len(owners)), asked.right, data.labels)
        np.add.at(sums, asked.which, found)
        np.add.at(times, asked.which, 1.0)
        eligible += votes.sum(axis=1).mean() / ORDERS
    right = sums[times > 0] / times[times > 0]
    more = {"owners": len(owners), "voters": round(eligible), "questions": len(right)}
    setting = {**setting, **more, "eps0": None if noise is None else noise.parameter}
    return {**setting, "accuracy": float(right.mean()), "error": float(right.std(ddof=1) / len(right) ** 0.5)}


def table(rows: list[dict[str, Any]], questions: int) -> str:
    """A line for each task and epsilon."""
    lines = ["| task | epsilon | accuracy | gate | share | tickets | voters of owners | on owners' texts | if "]
    lines[0] += f"{questions:,} tickets (share) |"
    lines.append("|" + " --- |" * 9)
    at_most = {(row["task"], row["epsilon"]): row for row in rows if row["tickets"] == questions}
    shown = {(row["task"], row["epsilon"]): row for row in reversed(rows)}
    for (task, epsilon), row in reversed(shown.items()):
        accuracy, other = f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}", at_most.get((task, epsilon))
        cells = [task, "no noise" if epsilon is None else f"{epsilon:g}", accuracy, row["gate"], f"{row['share']:g}"]
        cells += [row["tickets"] or "", f"{row['voters']:,} of {row['owners']:,}", f"{100 * row['development']:.1f}"]
        cells.append("" if other is None else f"{100 * other['accuracy']:.1f} ({other['share']:g})")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def gates_of(name: str, data: Data, known: Known) -> dict[str, Data]:
    """The task by its gate: as it is, and with the vectors of texts and their first two words joined."""

    def joined(part: str, rows: Rows) -> Rows:
        first = known.embed(f"{name}-{part}-words", [" ".join(text.split()[:2]) for text in rows.texts])
        both = (np.hstack([rows.vectors, first]) / math.sqrt(2.0)).astype(np.float32)
        return Rows(rows.texts, rows.labels, both)

    private, tests = joined("private", data.private), joined("tests", data.tests)
    return {TEXTS: data, WORDS: Data(private, tests, joined("public", data.public), data.labels)}


def main(argv: Sequence[str] | None = None) -> int:
    """Choose the settings and keep them, or count the votes, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--releases", type=int, default=1000, help="questions (default 1000)")
    parser.add_argument("--choose", action="store_true", help="choose the settings; ask no test question")
    options = parser.parse_args(argv)
    known = Known(options.vectors)
    tasks = {name: gates_of(name, data, known) for name, data in loaded(options, known).items()}
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / "settings.json"
    if options.choose:
        found: dict[str, Any] = {name: chosen(gates, options.releases) for name, gates in tasks.items()}
        kept.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    rows = []
    for name, settings in json.loads(kept.read_text()).items():
        rows += [{"task": name, **measured(tasks[name], setting, options.releases)} for setting in settings]
    text = (
        f"Label votes of owners behind a gate, without a model, at delta {DELTA:g} for {options.releases:,} questions: "
        "accuracy in %, ± its standard error over all test questions, with the gate, share and tickets that are best "
        "on owners' own texts."
    )
    line = shlex.join(["python", "examples/studies/label_votes.py", *(sys.argv[1:] if argv is None else argv)])
    found = {"measured": text, "table": table(rows, options.releases), "pictures": []}
    found |= {"settings": {"delta": DELTA, "releases": options.releases, "command": line}, "rows": rows}
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{text}\n\n{found['table']}\n")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

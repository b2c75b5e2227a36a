"""How right a label vote is: owners' own labels behind a gate, without a model, exactly.

    python examples/studies/label_votes.py --task trec=train.jsonl:test.jsonl --output results/label-votes

Each record of the first file is its own owner. As in the study of heads, 500 of them, drawn by a fixed seed, give up
their labels and are public texts. The gate lets in the owners whose similarity to the question reaches what a share of
the public texts reaches; all of these vote (a rate of 1). The share is chosen on 400 further records, drawn by the same
seed, which are then neither owners nor public, and the test questions are asked once with this share. Nothing is drawn:
the probability of the right label follows from the votes. Tickets are as many as questions, so no owner runs out.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from head_study import Data, Known, Rows, loaded, task_options
from numpy.typing import NDArray
from scipy.special import softmax

from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
SHARES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)
DEVELOPMENT = 400

Floats = NDArray[np.float64]


def counts(owners: Rows, asked: Rows, public: Rows, share: float, labels: list[str]) -> Floats:
    """The votes on every question, one column for each label."""
    bars = np.quantile(asked.vectors @ public.vectors.T, 1.0 - share, axis=1)
    let_in = asked.vectors @ owners.vectors.T >= bars[:, None]
    return np.asarray(let_in @ (np.array(owners.labels)[:, None] == np.array(labels)).astype(np.float64))


def chances(votes: Floats, noise: VoteNoise | None, right: list[str], labels: list[str]) -> Floats:
    """The probability of the right label on every question; without noise a tie counts as its share."""
    if noise is None:
        weights = (votes == votes.max(axis=1, keepdims=True)).astype(np.float64)
        found = weights / weights.sum(axis=1, keepdims=True)
    else:  # the outcome "members abstain" has its penalty, since nobody abstains here
        members = max(2, math.ceil(votes.sum(axis=1).mean()))
        silent = np.full((len(votes), 1), -noise.rate * noise.abstention_count(members, len(labels)))
        found = softmax(np.hstack([noise.rate * votes, silent]), axis=1)
    return np.asarray(found[np.arange(len(votes)), [labels.index(each) for each in right]])


def study(name: str, data: Data, releases: int) -> list[dict[str, Any]]:
    """The rows of a task: for each epsilon the share that is best on development records, and the test's accuracy."""
    drawn = np.random.default_rng(1).permutation(len(data.private))
    count = min(DEVELOPMENT, len(data.private) // 5)
    asked, owners = data.private.at(drawn[:count]), data.private.at(np.sort(drawn[count:]))
    held = {share: counts(owners, asked, data.public, share, data.labels) for share in SHARES}
    rows = []
    for epsilon in (None, *EPSILONS):
        noise = None
        if epsilon is not None:
            request = LineRequest(EXPONENTIAL, 1.0, releases, options={"own_calls": 1.0})
            line = PrivacyPlan.solve(epsilon=epsilon, delta=DELTA, lines={"vote": request}).lines["vote"]
            noise = VoteNoise(EXPONENTIAL, line.parameter, own_calls=True)
        by_share = {share: chances(votes, noise, asked.labels, data.labels).mean() for share, votes in held.items()}
        share = max(by_share, key=lambda each: by_share[each])
        votes = counts(owners, data.tests, data.public, share, data.labels)
        found = chances(votes, noise, data.tests.labels, data.labels)
        rows.append(
            {
                "task": name,
                "epsilon": epsilon,
                "share": share,
                "eligible": round(float(votes.sum(axis=1).mean())),
                "owners": len(owners),
                "questions": len(found),
                "eps0": None if noise is None else noise.parameter,
                "development": float(by_share[share]),
                "accuracy": float(found.mean()),
                "error": float(found.std(ddof=1) / math.sqrt(len(found))),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each task and epsilon."""
    lines = ["| task | epsilon | accuracy | share of the gate | eligible of owners | on development records |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        epsilon = "no noise" if row["epsilon"] is None else f"{row['epsilon']:g}"
        accuracy = f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}"
        eligible = f"{row['eligible']:,} of {row['owners']:,}"
        cells = row["task"], epsilon, accuracy, f"{row['share']:g}", eligible, f"{100 * row['development']:.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Count the votes, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--releases", type=int, default=1000, help="questions, and each owner's tickets (default 1000)")
    options = parser.parse_args(argv)
    tasks = loaded(options, Known(options.vectors))
    rows = [row for name, data in tasks.items() for row in study(name, data, options.releases)]
    measured = (
        f"Label votes of owners behind a gate, without a model, at delta {DELTA:g} for {options.releases:,} questions, "
        "every owner with as many tickets: accuracy in %, ± its standard error over all test questions."
    )
    line = shlex.join(["python", "examples/studies/label_votes.py", *(sys.argv[1:] if argv is None else argv)])
    found: dict[str, Any] = {"measured": measured, "table": table(rows), "pictures": []}
    found |= {"settings": {"delta": DELTA, "releases": options.releases, "command": line}, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{measured}\n\n{found['table']}\n")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

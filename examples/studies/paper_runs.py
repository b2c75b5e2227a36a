"""The runs of the papers' settings on embedded models, each one command of ``dpicl evaluate``.

``python examples/studies/paper_runs.py --data FOLDER --output FOLDER [--larger FILE] [--only NAME] [--queries N]``

The data folder has the sub-folders e2e, trec, agnews and sst2, each with ``train.jsonl`` (or ``.gz``) and the file of
queries; that of e2e also ``dev.jsonl``, for its inputs. The output folder gets a sub-folder for each run, with the
model's answers and the results: keep the answers out of version control. A run that was stopped resumes; other epsilons
and numbers of members ask the members nothing.
Without ``--larger``, the file that ``larger_model.py`` joins, the runs named so are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_TEXTS = "--task e2e --shots 4 --releases 100 --delta 5e-5 --epsilon 1 3 8 --draws 5 --queries 100 --shown 3"
_TOKENS = "--task e2e --queries 100 --method online"
_KEYWORDS = "--method joint-em --method ptr"
_VOTES = "--releases 10000 --delta 1e-4 --epsilon 1 3 8 --samples 2 --method vote"
_SIZES = {"": "--members 10 --shots 4", "-calls": "--calls 20"}

RUNS = {
    "ksa": f"{_TEXTS} --members 100 {_KEYWORDS} --method embedding --candidates 100 --vary members=10,40,100",
    "ksa-larger": f"{_TEXTS} --members 10 {_KEYWORDS}",
    "decoding": f"{_TOKENS} --epsilon 1 2 4 --samples 5 --method offline",
    "decoding-varied": f"{_TOKENS} --epsilon 2 --vary top_k=20,100,400 --vary shots=1,2,4,8 --vary releases=20,100,500",
    **{
        f"votes-{task}{name}": f"--task {task} {size} {_VOTES} --queries 500"
        for task in ("trec", "agnews", "sst2")
        for name, size in _SIZES.items()
    },
    "votes-trec-larger": f"--task trec {_SIZES['']} {_VOTES} --queries 200",
    "votes-trec-calls-larger": f"--task trec {_SIZES['-calls']} {_VOTES} --queries 200",
}
"""The settings of each run. The first of 100 members are a sample of 10 and of 40."""


def arguments(
    name: str,
    data: Path,
    output: Path,
    queries: int | None = None,
    larger: Path | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Return the arguments of ``dpicl`` for a run."""
    words = RUNS[name].split()
    folder = data / words[words.index("--task") + 1]
    train = next(path for ending in ("", ".gz") if (path := folder / f"train.jsonl{ending}").exists())
    tests = "test_multiref" if folder.name == "e2e" else "test"
    given = ["--data", str(train), "--test", str(folder / f"{tests}.jsonl"), "--output", str(output / name)]
    if "offline" in words:
        given += ["--public", str(folder / "dev.jsonl")]
    given += ["--model", str(larger) if name.endswith("-larger") else "smollm2-135m-instruct"]
    given += ["--in-batches", "--dtype", dtype, "--threads", "1"]
    if queries is not None:
        words[words.index("--queries") + 1] = str(queries)
    return ["evaluate", *words, *given]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands one after the other; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python examples/studies/paper_runs.py", description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="a folder with a sub-folder for each data set")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the model's answers and the results")
    parser.add_argument("--larger", type=Path, help="the file of the larger model")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME", help="these runs")
    parser.add_argument("--queries", type=int, help="for a trial: other numbers of queries")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 needs half the memory; without instructions for it a processor is some 8 times slower",
    )
    options = parser.parse_args(argv)
    names = [name for name in options.only if options.larger or not name.endswith("-larger")]
    own = options.data, options.output, options.queries, options.larger, options.dtype
    given = [arguments(name, *own) for name in names]
    codes = [subprocess.call([sys.executable, "-m", "langchain_dpicl", *each]) for each in given]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())

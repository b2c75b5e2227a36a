"""How good private decoding is: ROUGE-L and meaning against epsilon, beside what is not private.

``python examples/studies/token_study.py --data TRAIN --test TEST --inputs PUBLIC --output FOLDER``

For data that are public in truth: it shows answers that are not private. Every method answers the same queries, and a
finished one is kept in FOLDER, so a study that was stopped goes on where it was; ``--only`` runs some methods, so that
several processes may share a study. It writes ``results.json``, ``table.md`` and two pictures of what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from token_methods import Outcome, Study
from token_report import report

from langchain_dpicl.errors import DPICLError, InvalidParameter
from langchain_dpicl.store.datafile import read_records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the methods that are missing, and report when all are there."""
    parser = argparse.ArgumentParser(prog="python examples/studies/token_study.py", description=__doc__)
    parser.add_argument("--data", required=True, help="examples that play the private ones: records input, output")
    parser.add_argument("--test", required=True, help="queries: records input, output and perhaps references")
    parser.add_argument("--inputs", help="public inputs for the offline demonstrations")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument(
        "--template", nargs=2, default=[r"Data: {input}\nDescription: {output}\n\n", r"Data: {input}\nDescription:"]
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--delta", type=float, help="default: a tenth of 1 / number of examples")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--demonstrations", type=int, default=16, help="offline demonstrations to make (default 16)")
    parser.add_argument("--prompt-shots", type=int, default=4, help="demonstrations in a few-shot prompt (default 4)")
    parser.add_argument("--max-tokens", type=int, default=25)
    parser.add_argument("--min-tokens", type=int, default=8)
    parser.add_argument("--shots", type=float, default=4.0, help="expected owners per token (default 4)")
    parser.add_argument("--kappa", type=float, default=3.0, help="how much the public logits count (default 3)")
    parser.add_argument("--cap", type=float, default=1.5)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws, the same in all methods; one folder each (default 0)"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only methods whose name has one of these words")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except DPICLError as error:
        print(f"token_study: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    private, queries = read_records(options.data), read_records(options.test)[: options.queries]
    for name, found in (("data", private), ("test", queries)):
        if not all(isinstance(row.get(key), str) for row in found for key in ("input", "output")):
            raise InvalidParameter(name, getattr(options, name), "records with the texts 'input' and 'output'")
    study = Study(options, private, queries, read_records(options.inputs) if options.inputs else [])
    kept = options.output / "methods"
    kept.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for name, run in study.methods.items():
        path = kept / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"
        if not path.exists() and (not options.only or any(word in name for word in options.only)):
            path.write_text(json.dumps(asdict(run()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if path.exists():
            outcomes.append(Outcome(**json.loads(path.read_text(encoding="utf-8"))))
    asked = {key: value for key, value in vars(options).items() if key not in ("output", "only", "json", "threads")}
    asked |= {key: Path(asked[key]).name for key in ("data", "test", "inputs") if asked[key]}
    results = report(outcomes, asked, options.output)
    print(json.dumps(results, indent=2) if options.json else results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

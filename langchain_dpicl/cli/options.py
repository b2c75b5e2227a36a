"""The options of `answer`, `fit` and `synthesize`: help does not wait for what carries these commands out."""

from __future__ import annotations

from typing import Any

from langchain_dpicl.cli import add_model, add_parameters, add_private_data, add_run, add_store, later
from langchain_dpicl.parameters import kinds, parameters_of

FIT = parameters_of("once/head.py", "PrivateHead", "fit")
"""What `PrivateHead.fit` takes."""


def answer_options(parser: Any) -> None:
    """Label new texts by a noisy vote of model calls that see private examples from your file, or write texts in the
    style of the examples' outputs.

    examples:
      dpicl answer --data tickets.jsonl --labels billing,technical --epsilon 3 --question "My card was charged twice"
      dpicl answer --data tickets.jsonl --labels billing,technical --epsilon 1 --calls 20 --prior zero_shot \\
        --test held-out.jsonl
      dpicl answer --data tickets.jsonl --labels billing,technical --epsilon 1 --mode label-vote --threshold 0.4 \\
        --eligible 50 --test held-out.jsonl
      dpicl answer --data reviews.csv --labels negative,positive --epsilon 1 --test held-out.csv
      dpicl answer --data notes.jsonl --mode embedding --epsilon 3 --output-key note --question "Patient: I cough"
      dpicl answer --mode head --head head.npz --test held-out.csv
      dpicl answer --config server.yaml --question "My card was charged twice"

    --config asks what `dpicl serve` would answer, from the same store and on the same budget.
    """
    add_run(parser, later(".answer", "answer"))
    parser.add_argument("--config", metavar="FILE", help="a server's file, instead of all options but the questions'")
    parser.add_argument("--caller", metavar="NAME", help="with --config: the caller who asks (default: anonymous)")
    add_private_data(parser, "text", "label", required=False)
    add_store(parser)
    parser.add_argument("--head", metavar="FILE", help="what `dpicl fit` has written (mode head: nothing is charged)")
    parser.add_argument("--releases", type=int, default=1000, help="how many answers the budget is for (default 1000)")
    parser.add_argument("--tickets", action="store_true", help="--releases counts each owner's, not the questions")
    parser.add_argument("--accept-noise", action="store_true", help="go on even if the plan is all noise")
    parser.add_argument("--question", action="append", default=[], help="a text to answer; may be repeated")
    parser.add_argument("--test", help="a file with the right answers: prints scores, beside what is NOT private")
    parser.add_argument("--held-out", type=int, default=0, help="keep this many owners of --data out, as the test")
    parser.add_argument("--limit", type=int, help="use only the first N test records")
    parser.add_argument("--compare", action="store_true", help="show answers that are NOT private beside --question's")
    add_model(parser, "the usual one")
    if {"-h", "--help"} & {*parser.given} and not any(word.startswith("--mode") for word in parser.given):
        names = ", ".join([*kinds(), "documents", "head"])  # to import them would take most of the time
        more = "`dpicl answer --mode KIND --help` has the options of kinds"
        parser.add_argument("--mode", metavar="KIND", help=f"the kind of answer (default vote): {names}; {more}")
        return
    from langchain_dpicl.cli.kinds import add_kinds

    add_kinds(parser)


def synthesize_options(parser: Any) -> None:
    """Write an output for each public input, token by token, in the style of the private examples' outputs. The pairs
    are public: show them to any model, as often as you like, at no further cost.

    examples:
      dpicl synthesize --data notes.jsonl --inputs topics.txt --epsilon 3 --output demonstrations.jsonl
      dpicl synthesize --data reviews.csv --input-key text --output-key reply --inputs public.csv --epsilon 1 \\
        --max-tokens 60 --owner-key customer --output demonstrations.jsonl

    Run the same command again to resume an interrupted job; finished texts are not charged again.
    """
    from langchain_dpicl.local import DEFAULT_MODEL

    add_run(parser, later(".answer", "synthesize"))
    add_private_data(parser, "input", "output")
    parser.add_argument("--inputs", required=True, help="public inputs: such a file, or a text with one a line")
    parser.add_argument("--output", required=True, help="the file for the demonstrations, as JSON lines")
    parser.add_argument("--tokens", type=int, help="how many the budget is for (default: inputs times --max-tokens)")
    parser.add_argument("--max-tokens", type=int, default=25, help="the longest output (default 25)")
    parser.add_argument("--min-tokens", type=int, help="the shortest output (default: the sampler's)")
    parser.add_argument("--shots", type=int, default=4, help="expected owners per token, 2 or more (default 4)")
    parser.add_argument("--top-k", type=int, help="candidates per token (default: the sampler's)")
    stop = "a text that ends an output; may be repeated (default: an empty line)"
    parser.add_argument("--stop", action="append", help=stop)
    parser.add_argument("--input-name", help="the word before an input in a prompt, such as Data (default: its key)")
    parser.add_argument("--output-name", help="the word before an output, such as Description (default: its key)")
    parser.add_argument("--limit", type=int, help="use only the first N inputs")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an embedded model, a GGUF file or a folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def fit_options(parser: Any) -> None:
    """Fit a classifier on private examples once. It then labels any number of texts: no model calls, no noise and no
    charge for an answer.

    examples:
      dpicl fit --data tickets.jsonl --labels billing,technical --epsilon 1 --output head.npz
      dpicl fit --data reviews.csv --labels negative,positive --epsilon 1 --delta 1e-6 --owner-key user --output h.npz
      dpicl answer --mode head --head head.npz --question "My card was charged twice"
      dpicl fit --data reviews.csv --labels negative,positive --epsilon 1 --output h.npz --public texts.txt \\
        --model smollm2-135m-instruct --score-prompt 'Review: {input}\\nSentiment:'

    Run the same command again to resume an interrupted fit; it is charged once.
    """
    add_run(parser, later(".head", "fit"))
    add_private_data(parser, "text", "label")
    add_store(parser)
    add_parameters(
        parser,
        {name: each for name, each in FIT.items() if name not in ("input_key", "line", "progress")},
        required=["output"],
        labels=" (separated by commas)",
        public=" (a file: one a line, or records)",
        owners=" (default: as the budget, else as the file)",
        output=" (.npz)",
    )
    parser.add_argument("--fits", type=int, default=1, help="how many fits the budget is for (default 1)")
    parser.add_argument("--report", metavar="FILE", help="private: how many records were left out, for the operator")
    parser.add_argument(
        "--score-prompt",
        metavar="TEMPLATE",
        help="a prompt with {input}, such as 'Review: {input}\\nSentiment:': the model's scores of the labels after it "
        "are features, too (needs --public and --model; slow: one call for each record)",
    )
    add_model(parser, "none")

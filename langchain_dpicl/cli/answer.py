"""The commands that release answers from your own examples: ``answer`` and ``synthesize``."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, cast

from langchain_dpicl.cli import (
    READING,
    add_columns,
    add_model,
    add_private_data,
    add_run,
    check_only,
    chosen,
    given,
    holds_records,
    keys_in,
    show,
)
from langchain_dpicl.cli.data import keys_of, private_store, read_file
from langchain_dpicl.errors import InvalidParameter, PrivacyWarning
from langchain_dpicl.parameters import kinds

if TYPE_CHECKING:
    from langchain_dpicl import PrivateHead
    from langchain_dpicl.cli.session import Session
    from langchain_dpicl.privacy import PrivacyPlan


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
    add_run(parser, answer)
    parser.add_argument("--config", metavar="FILE", help="a server's file, instead of all options but the questions'")
    parser.add_argument("--path", help="with --config: which of its releases is asked, if it has several")
    parser.add_argument("--caller", metavar="NAME", help="with --config: the caller who asks (default: anonymous)")
    add_private_data(parser, "text", "label", required=False)
    parser.add_argument("--head", metavar="FILE", help="what `dpicl fit` has written (mode head: nothing is charged)")
    parser.add_argument("--releases", type=int, default=1000, help="how many answers the budget is for (default 1000)")
    parser.add_argument("--tickets", action="store_true", help="--releases counts each owner's, not the questions")
    parser.add_argument("--accept-noise", action="store_true", help="go on even if the plan is all noise")
    parser.add_argument("--question", action="append", default=[], help="a text to answer; may be repeated")
    parser.add_argument("--test", help="a file with the right answers: prints scores, beside what is NOT private")
    add_columns(parser, "test")
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


def answer(options: argparse.Namespace) -> int:
    """Answer the questions, then the test."""
    from langchain_dpicl.cli.kinds import spec_of
    from langchain_dpicl.cli.session import Session, known_answers, open_budget, writer

    if options.limit is not None and options.limit < 1:
        raise InvalidParameter("--limit", options.limit, "at least 1")
    if options.config:
        return _answer_as_served(options)
    if options.mode == "head":
        from langchain_dpicl.cli.head import answer_by_head

        return answer_by_head(options)
    for name in ("data", "epsilon"):
        if getattr(options, name) is None:
            raise InvalidParameter(f"--{name}", None, "given, except with --mode head and --config")
    for name, instead in (("head", "--mode head"), ("caller", "--config"), ("path", "--config")):
        if getattr(options, name):
            raise InvalidParameter(f"--{name}", getattr(options, name), f"left out, or {instead}")
    settings = spec_of(options)
    if settings.is_of_documents:
        options.output_key = ""
    assert settings.release is not None
    keys, outputs = keys_of(options), settings.release.outputs
    tested = keys_in(options, "test", keys) if options.test else keys
    records, held_out = read_file(options, options.data, keys, is_private=True, **outputs), []
    if options.held_out > 0:  # the last owners of the file: the same ones in every run
        owner_of = [row.get(keys.owner_key) if keys.owner_key else i for i, row in enumerate(records)]
        last = set(list(dict.fromkeys(reversed(owner_of)))[: options.held_out])
        held_out = [row for owner, row in zip(owner_of, records, strict=True) if owner in last]
    tests = held_out
    if options.test:
        tests = read_file(options, options.test, tested, **outputs)
    if not options.question and not tests:
        raise InvalidParameter("--question", None, "at least one --question, or --test FILE, or --held-out N")
    store = private_store(options, records, held_out)
    own = {"tickets": options.tickets, "accept_noise": options.accept_noise}
    release = settings.over(store, lambda: open_budget(options, store, lambda _: options.releases, **own))
    return _asked(Session(release, options, writer(settings, store)), known_answers(tests, tested, outputs))


def _asked(session: Session, known: list[tuple[str, str]]) -> int:
    """Say what an answer is made of; ask the questions, then the test."""
    from langchain_dpicl.release.advice import poor_plan

    options, release = session.options, session.release
    selector, budget, line = release.selector, release.budget, release.line()
    session.say(f"{release.store!r}; {budget!r}")
    calls = f"about {selector.calls:g} calls of one owner each" if selector.calls else f"{selector.members} calls"
    if getattr(getattr(release, "aggregator", None), "task", None) == "none":
        calls = "the labels of owners near to the question, no calls"
    session.say(f"each answer: {calls}, rate {line.rate:.4g}; released: {line.plan_line.describe()}")
    if warning := poor_plan(release, line.plan_line):
        session.say(f"warning: {warning}")
    session.ask(options.question, compared=options.compare)
    session.test(known[: options.limit])
    noise = dict.fromkeys(("parameter", line.plan_line.family.parameter), line.parameter)
    facts = {"mechanism": line.mechanism, "members": selector.members, "calls": selector.calls, "warning": warning}
    return session.finish(epsilon=budget.epsilon, delta=budget.delta, rate=line.rate, **facts, **noise)


def _answer_as_served(options: argparse.Namespace) -> int:
    """Ask what a server's file describes, as its caller."""
    from langchain_dpicl.cli.head import answer_by_head
    from langchain_dpicl.cli.session import Session, known_answers
    from langchain_dpicl.release.base import releases_in
    from langchain_dpicl.release.transaction import acting_for
    from langchain_dpicl.serving.config import read
    from langchain_dpicl.store.records import RecordKeys

    asked = {"config", "path", "caller", "question", "test", "test_columns", "limit", "compare"}
    check_only(options, {*asked, *READING}, "--config")
    if not options.question and not options.test:
        raise InvalidParameter("--question", None, "at least one --question, or --test FILE")
    settings = read(options.config)
    served = settings.at(options.path)
    if served.chain is not None:
        raise InvalidParameter("--config", options.config, "a file with a release or a head, not a chain of your own")
    made = settings.chains()[served.path]
    if served.head is not None:
        return answer_by_head(options, cast("PrivateHead", made))
    assert served.release is not None
    (release,) = releases_in(made)
    keys = keys_in(options, "test", RecordKeys(release.store.input_key, release.store.output_key, None))
    outputs = served.release.outputs
    tests = read_file(options, options.test, keys, **outputs) if options.test else []
    with acting_for(options.caller or "anonymous"):
        return _asked(Session(release, options), known_answers(tests, keys, outputs))


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

    add_run(parser, synthesize, releases="tokens")
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


def synthesize(options: argparse.Namespace) -> int:
    """Write the demonstrations. Returns 1 if inputs stay unanswered."""
    from tqdm import tqdm

    from langchain_dpicl import synthesize_demonstrations
    from langchain_dpicl.cli.session import shortened
    from langchain_dpicl.decoding import Made
    from langchain_dpicl.members.chains import read_lines
    from langchain_dpicl.release.advice import poor_plan
    from langchain_dpicl.store.datacheck import NO_KEYS

    started, made = time.monotonic(), []
    if options.limit is not None and options.limit < 1:
        raise InvalidParameter("--limit", options.limit, "at least 1")
    is_file = holds_records(options.inputs)
    found: list[Any] = (
        read_file(options, options.inputs, NO_KEYS) if is_file else read_lines("--inputs", options.inputs)
    )
    if not found:
        raise InvalidParameter("--inputs", options.inputs, "a file with at least one input")
    inputs: list[Any] = found[: options.limit]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an owner changes the log-odds", PrivacyWarning)  # of the plan: said below
        sampler = _sampler(options, len(inputs))
    line = sampler.line()
    if (warning := poor_plan(sampler, line.plan_line)) is not None:
        print(f"dpicl synthesize: {warning}", file=sys.stderr)
    if not options.json:
        print(f"{sampler.selector.store!r}; {sampler.budget!r}")
        print(f"each output: at most {options.max_tokens} tokens, rate {line.rate:.4g}; {line.plan_line.describe()}\n")
    with tqdm(total=len(inputs), desc="demonstrations", disable=None, file=sys.stderr) as bar:

        def progress(one: Made) -> None:
            made.append({**one.pair, "receipt": one.receipt})
            if not options.json:
                asked = ", ".join(str(value) for key, value in one.pair.items() if key != options.output_key)
                said = shortened(one.pair[options.output_key]) or "-"
                bar.write(f"  {shortened(asked)}\n    {said}", file=sys.stdout)
            bar.total, bar.n = one.total, one.done
            bar.refresh()

        options.answered = lambda: {"demonstrations": made}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # unanswered inputs are reported below
                written = synthesize_demonstrations(sampler, inputs, output=options.output, progress=progress)
        except KeyboardInterrupt:
            print("\ndpicl synthesize: interrupted; the same command resumes here", file=sys.stderr)
            raise
    budget, unanswered = sampler.budget, written.unanswered
    facts = {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "epsilon_spent": budget.epsilon_spent(),
        "tokens": sum(receipt["tokens"] or 0 for receipt in written.receipts),
        "remaining": line.remaining(),
        "warning": warning,
        "output": options.output,
        "unanswered": unanswered,
        "demonstrations": [{**pair, "receipt": each} for pair, each in zip(written, written.receipts, strict=True)],
        "seconds": round(time.monotonic() - started, 1),
    }
    text = (
        f"\n{len(written)} demonstrations ({len(made)} of them new) of {facts['tokens']} tokens in {options.output}\n"
        f"epsilon {facts['epsilon_spent']:.3g} of {budget.epsilon:g} spent at delta {budget.delta:.2g}, "
        f"{facts['remaining']} tokens left; {facts['seconds']:.0f} seconds."
    )
    show(options, facts, text)
    if unanswered:
        left = f"{len(unanswered)} of {len(unanswered) + len(written)} inputs"
        print(f"dpicl synthesize: {left} stay unanswered: the budget's tokens are spent", file=sys.stderr)
    return 1 if unanswered else 0


def _sampler(options: argparse.Namespace, inputs: int) -> Any:
    """Open the store, the budget and the model."""
    from langchain_dpicl import DemonstrationTemplate, DPSampler, PoissonExampleSelector
    from langchain_dpicl.cli.session import open_budget
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

    def tokens(plan: PrivacyPlan | None) -> int:
        """As given, as frozen, or enough for every input."""
        if options.tokens is not None:
            return int(options.tokens)
        frozen = None if plan is None else plan.lines.get("tokens")
        return max(options.max_tokens, 1) * inputs if frozen is None else frozen.count

    if options.shots < 2:
        raise InvalidParameter("--shots", options.shots, "at least 2")
    store = private_store(options, read_file(options, options.data, keys_of(options), is_private=True))
    budget = open_budget(options, store, tokens)
    settings = given(options, "min_tokens", "top_k")
    if options.stop:
        settings["stop"] = [text.replace("\\n", "\n") for text in options.stop]
    return DPSampler(
        TransformersLogits(options.model, dtype=options.dtype),
        PoissonExampleSelector(store, options.shots, shots=1),
        budget,
        template=DemonstrationTemplate.of(store, **chosen(options, "input_name", "output_name")),
        max_tokens=options.max_tokens,
        **settings,
    )

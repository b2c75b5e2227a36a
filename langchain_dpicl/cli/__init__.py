"""``dpicl`` on the command line, and the options and the printer that its commands share.

A command is two functions: ``NAME_options`` declares its options, and its docstring is the text of ``--help``; ``NAME``
carries it out and returns the exit status. Only the module of the given command loads.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_dpicl import __version__
from langchain_dpicl.errors import DPICLError, InvalidConfiguration, InvalidParameter
from langchain_dpicl.parameters import Parameter, sentence

if TYPE_CHECKING:
    from langchain_dpicl.members.chains import ModelChoice
    from langchain_dpicl.store.records import RecordKeys

COMMANDS = {
    "check-data": (
        "data",
        "what a data file holds, what commands would refuse in it, and what would weaken privacy",
    ),
    "demo": ("demo", "two kinds of private answers from a generated clinic inbox, with the embedded model"),
    "answer": ("answer", "answer questions from your own examples"),
    "fit": ("head", "fit a classifier on your own examples once, and ask it for ever"),
    "table": ("table", "count once what texts say about public topics, and ask it for ever"),
    "topics": ("topics", "report what users ask, by topic, and what could not be answered"),
    "synthesize": ("answer", "write public demonstrations from your own examples"),
    "advise": (".lab.advise", "which mechanism suits your numbers, and which epsilon and delta to choose"),
    "plan": ("plan", "what a privacy target allows: rate, noise, cost, chance that noise flips a vote"),
    "budget": ("budget", "show what was spent: budgets, history, receipts, exports"),
    "report": ("report", "a data protection report of a ledger: promises, spending, outcomes, as HTML or Markdown"),
    "forget": ("budget", "remove an owner from a store and from its ledgers"),
    "rehearse": (
        "rehearse",
        "try a configuration's chain on public examples, at no cost: prompts, outputs, errors",
    ),
    "serve": ("serve", "answer over HTTP, with keys, limits and several workers on one budget"),
    "mcp": ("mcp", "offer what a server's file describes as tools to agents, by the Model Context Protocol"),
    "upgrade": ("upgrade", "bring a configuration, a ledger or a store of an earlier release to today's form"),
    "evaluate": (".lab.measure", "measure private answers on a task with known answers"),
    "audit": (".lab.measure", "attack the mechanisms: a lower bound on epsilon beside the claimed one"),
}
"""The module of each command, and what the command does. The lab's are found here alone: nothing else imports it."""


def lab(module: str) -> Any:
    """A module of the lab, which measures and draws."""
    return import_module(f"langchain_dpicl.lab.{module}")


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the options of one command; its function is ``run``."""
    return parser_of(given).parse_args(given)


def parser_of(given: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of the given one alone."""
    parser = argparse.ArgumentParser(
        prog="dpicl", description="Differentially private in-context learning: answers from private examples."
    )
    parser.add_argument("--version", action="version", version=f"langchain-dpicl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command: Any = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in given[:1]:
            declare = getattr(import_module(f".{module}", __name__), f"{name.replace('-', '_')}_options")
            command.description = inspect.getdoc(declare)
            command.given = given[1:]
            declare(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The package's errors are one line on stderr (with ``--json`` also an object) and exit 1."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return int(options.run(options))
    except DPICLError as error:
        kind, message = type(error).__name__, told(error, options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if options.json:
        print(json.dumps({"error": kind, "message": message, **options.answered()}))
    print(f"dpicl {options.command}: {message}", file=sys.stderr)
    return 1


def told(error: DPICLError, options: argparse.Namespace) -> str:
    """Return an error's message, with the option that gives a parameter in its place. A file gives the others."""
    written: dict[str, str] = {}
    for action in options.parser._actions:
        if action.dest in _given(options) or not getattr(options, "config", None):
            written[action.dest] = (action.option_strings or [action.metavar])[0]
    others = {name: written[option] for name, option in options.parser.parameters.items() if option in written}
    written = others | written

    def option(found: re.Match[str]) -> str:
        return written.get(found[0], found[0])

    if isinstance(error, InvalidConfiguration):  # its names are those of a file
        return str(error)
    if isinstance(error, InvalidParameter):
        named = re.sub(r"^\w+", option, error.parameter)
        bound = re.sub(r"(?<![\w-])\w+(?==\S)", option, error.bound)
        return str(InvalidParameter(named, error.value, bound))
    return re.sub(r"(?<![\w-])\w+(?= \S+ \(asked: )", option, str(error))


def chosen(options: object, *names: str) -> dict[str, Any]:
    """Return these options by name, to be passed on."""
    return {name: getattr(options, name) for name in names}


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of these options that have a value, by name."""
    return {name: value for name, value in chosen(options, *names).items() if value is not None}


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are not as usual, by name."""
    usual = {action.dest: action.default for action in options.parser._actions}
    return {name: value for name, value in vars(options).items() if name in usual and value != usual[name]}


def _parser(command: str) -> Any:
    """Return the parser of this command alone."""
    commands: Any = parser_of([command])
    return next(each.choices[command] for each in commands._actions if isinstance(each.choices, dict))


def carried(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the options that were given, and that another command has, too."""
    there = {action.dest for action in _parser(command)._actions}
    return {name: value for name, value in _given(options).items() if name in there}


def written_out(command: str, values: Mapping[str, Any]) -> str:
    """Return a command with these options, for a shell."""
    words = ["dpicl", command]
    for name, value in values.items():
        text = str(value)
        if isinstance(value, Mapping):
            text = ",".join(map("=".join, value.items()))
        if value is True:
            words.append(flag(name))
        elif text.startswith("-"):
            words.append(f"{flag(name)}={text}")
        else:
            words += [flag(name), text]
    return shlex.join(words)


def check_apart(options: argparse.Namespace, *names: str) -> None:
    """Refuse the private examples (``--data``) as the file of one of these options. Looks at names of files alone."""
    for name in names:
        path, private = (str(getattr(options, each)) for each in (name, "data"))
        both_exist = os.path.exists(path) and os.path.exists(private)
        if path == private or (both_exist and os.path.samefile(path, private)):
            raise InvalidParameter(flag(name), path, "another file than --data: its records are private")


READING = ("delimiter", "encoding", "skip_bad")
"""What `add_reading` declares."""


def check_only(options: argparse.Namespace, used: set[str], instead: str) -> None:
    """Refuse every option but the ``used`` ones. ``instead``: the option that takes their place."""
    for name, value in _given(options).items():
        if name not in {*used, "json"}:
            raise InvalidParameter(flag(name), value, f"left out with {instead}")


def holds_records(path: str) -> bool:
    """True if a public file has records, by its name; otherwise it has one text a line."""
    from langchain_dpicl.store.datafile import ENDINGS

    return path.removesuffix(".gz").endswith(ENDINGS)


def show(options: argparse.Namespace, facts: Any, text: str, indent: int | None = 2) -> int:
    """Print the facts as JSON if ``--json`` asks for them, otherwise the text. Returns the exit status 0."""
    print(json.dumps(facts, indent=indent) if options.json else text, flush=True)
    return 0


def add_run(parser: Any, run: Callable[[argparse.Namespace], int], **parameters: str) -> None:
    """Name the function of a command, and declare ``--json``, which every command has.

    If the command fails, ``answered`` says what was charged before: a function that the command may replace.
    ``parameters``: those that an option of another name gives, with this option.
    """
    parser.parameters = {"base_url": "model_url", "path": "store", **parameters}
    parser.set_defaults(run=run, answered=dict, parser=parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def flag(option: str) -> str:
    """Return an option as it is written."""
    return f"--{option.replace('_', '-')}"


def number(text: str) -> float:
    """A whole number, or one with a point."""
    return int(text) if text.isdecimal() else float(text)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers, separated by commas."""
    return tuple(map(number, text.split(",")))


def column(text: str) -> str:
    """The name of a column."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of a column is empty")
    return text


def owner_column(text: str) -> str:
    """The name of a column of owners; empty if each record is its own owner."""
    return text and column(text)


TYPES: dict[str, dict[str, Any]] = {
    "tuple": {"type": numbers},
    "bool": {"action": argparse.BooleanOptionalAction},
    "float": {"type": number},
    "int": {"type": int},
    "str": {},
}
"""An option for each type that a text can give, by its name."""


def add_parameters(group: Any, parameters: Mapping[str, Parameter], required: Sequence[str] = (), **more: str) -> None:
    """Declare an option for each parameter that a text can give; None unless given. ``more``: further words."""
    for name, (annotation, default, description) in parameters.items():
        usual = "" if default in (None, "None", "False") else f" (default {default})"
        words = sentence(name, description) + more.get(name, usual)
        for kind in [kind for kind in TYPES if re.search(rf"\b{kind}\b", annotation)][:1]:
            group.add_argument(flag(name), help=words, required=default is None or name in required, **TYPES[kind])


def add_ledger(parser: Any, summary: str = "the ledger's address") -> None:
    """Declare ``--ledger``."""
    parser.add_argument("--ledger", default="sqlite:///dpicl-budget.db", help=summary)


def add_witness(parser: Any) -> None:
    """Declare ``--witness``."""
    parser.add_argument("--witness", metavar="PATH", help="the ledger's witness: a path or a URL (default: beside it)")


def add_reading(parser: Any) -> None:
    """Declare how data files are read."""
    files = parser.add_argument_group("data files")
    names = "comma, semicolon, tab, pipe, or a character"
    files.add_argument("--delimiter", help=f"of CSV files: {names} (default: the header's own)")
    files.add_argument("--encoding", default="utf-8", help="such as cp1252 or utf-16 (default: UTF-8)")
    files.add_argument("--skip-bad", action="store_true", help="leave out records that cannot be used")


def columns(text: str) -> dict[str, str]:
    """Columns of other names, such as ``text=body,label=topic``."""
    found = {}
    for each in text.split(","):
        key, _, name = each.partition("=")
        if not key or not name:
            raise argparse.ArgumentTypeError(f"{each!r} is not of the form text=NAME or label=NAME")
        found[key] = name
    return found


def add_columns(parser: Any, *files: str) -> None:
    """Declare the names of columns in the files of these options, where they are not those of ``--data``."""
    for name in files:
        words = f"columns of --{name}, if not those of --data"
        parser.add_argument(f"--{name}-columns", type=columns, default={}, metavar="text=NAME,label=NAME", help=words)


def keys_in(options: argparse.Namespace, file: str, keys: RecordKeys) -> RecordKeys:
    """Return the keys of a record in the file of this option. ``keys``: those of the private examples."""
    given = getattr(options, f"{file}_columns")
    if stray := given.keys() - {"text", "label"}:
        raise InvalidParameter(flag(f"{file}_columns"), min(stray), "text=NAME, label=NAME, or both")
    input_key, output_key = given.get("text", keys.input_key), given.get("label", keys.output_key)
    return keys._replace(input_key=input_key, output_key=output_key, owner_key=None)


def add_private_data(parser: Any, input_key: str, output_key: str, *, required: bool = True) -> None:
    """Declare the file with the private examples and its keys, and the budget that protects them."""
    kinds = "JSON lines, CSV or TSV (plain or .gz), or Parquet"
    parser.add_argument("--data", required=required, help=f"private examples: {kinds}; see `dpicl check-data`")
    parser.add_argument("--input-key", type=column, default=input_key)
    parser.add_argument("--output-key", default=output_key)
    owner = "names the owner of a record; '' if each record is its own owner (default: the same, with a notice)"
    parser.add_argument("--owner-key", type=owner_column, help=owner)
    parser.add_argument("--epsilon", type=float, required=required)
    delta = "default: the budget's; for a new one .1 / number of owners, which that tells"
    parser.add_argument("--delta", type=float, help=delta)
    kept = "a file, or postgresql://..., that keeps --data's embeddings and follows its changes (default: DATA.store)"
    parser.add_argument("--store", metavar="PATH", help=kept)
    add_ledger(parser, "counts what is spent")
    add_witness(parser)
    parser.add_argument("--name", help="the budget's name in the ledger (default: the file's name)")
    shown = "print, on stderr, counts of the private records and progress bars: for the operator alone"
    parser.add_argument("--private-notes", action="store_true", help=shown)
    add_reading(parser)


def add_ensemble(parser: Any, members: int, shots: int) -> None:
    """Declare how many calls answer, and with how many examples each."""
    parser.add_argument("--members", type=int, default=members, help=f"parallel calls per answer (default {members})")
    parser.add_argument("--shots", type=int, default=shots, help=f"expected examples per call (default {shots})")


def add_model(parser: Any, default: str) -> None:
    """Declare the model: an embedded one, or one on a server."""
    parser.add_argument("--model", help=f"an embedded model, or a server's model (default: {default})")
    url = "an OpenAI-compatible server; its key is read from OPENAI_API_KEY"
    parser.add_argument("--model-url", action="append", help=url)


def model_of(options: argparse.Namespace) -> ModelChoice:
    """The model that `add_model` declares. Raises `InvalidParameter` for several addresses."""
    from langchain_dpicl.members.chains import ModelChoice

    urls = options.model_url or [None]
    if len(urls) > 1:
        bound = "one address: several servers of a model stand behind one proxy"
        raise InvalidParameter("--model-url", f"{len(urls)} addresses", bound)
    return ModelChoice(options.model, urls[0])


def add_prices(parser: Any) -> None:
    """Declare the prices of tokens."""
    parser.add_argument("--price-in", type=float, default=0.0, help="the price of a million prompt tokens")
    parser.add_argument("--price-out", type=float, default=0.0, help="the price of a million answer tokens")

"""``dpicl`` on the command line.

Each command is a module: its docstring is the text of ``--help``, ``add_options`` declares its options, and ``run``
carries it out and returns the exit status. Only the module of the given command loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from langchain_dpicl.cli.options import add_json
from langchain_dpicl.errors import DPICLError

COMMANDS = {
    "demo": "private answers from a generated clinic inbox, with the embedded model",
    "answer": "answer questions from your own examples",
    "synthesize": "write public demonstrations from your own examples",
    "plan": "what a privacy target allows: rate, noise, cost, chance that noise flips a vote",
    "budget": "show what was spent: budgets, history, receipts, exports",
    "forget": "remove an owner from a saved store and from its ledgers",
    "serve": "answer over HTTP, with keys, limits and several workers on one budget",
    "evaluate": "measure private answers on a task with known answers",
    "audit": "attack the mechanisms: a lower bound on epsilon beside the claimed one",
}


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the options of one command; its function is ``run``."""
    parser = argparse.ArgumentParser(
        prog="dpicl", description="Differentially private in-context learning: answers from private examples."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in given[:1]:
            module = import_module(f"langchain_dpicl.cli.{name}")
            command.description = module.__doc__
            if name != "budget":  # its actions have the option
                add_json(command)
                command.set_defaults(run=module.run)
            module.add_options(command)
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The package's errors are one line on stderr (with ``--json`` also an object) and exit 1."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return int(options.run(options))
    except DPICLError as error:
        kind, message = type(error).__name__, str(error)
        answered = error.__dict__.get("answered", {})
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if options.json:
        print(json.dumps({"error": kind, "message": message, **answered}))
    print(f"dpicl {options.command}: {message}", file=sys.stderr)
    return 1

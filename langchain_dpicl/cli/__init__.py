"""``dpicl`` on the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from langchain_dpicl.errors import DPICLError

_COMMANDS = ("demo", "answer", "synthesize", "plan", "budget", "forget", "serve", "evaluate", "audit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The package's errors are one line on stderr (with ``--json`` also an object) and exit 1."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="dpicl", description="Differentially private in-context learning: answers from private examples."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in [each for each in _COMMANDS if each in given[:1]] or _COMMANDS:
        import_module(f"langchain_dpicl.cli.{name}").add_parser(commands)
    options = parser.parse_args(given)
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

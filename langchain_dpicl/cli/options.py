"""Options that several commands share, each declared once, and the printer that all commands share."""

from __future__ import annotations

import argparse
import json
from typing import Any


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return these options by name, to be passed on."""
    return {name: getattr(options, name) for name in names}


def show(options: argparse.Namespace, facts: Any, text: str, indent: int | None = 2) -> int:
    """Print the facts as JSON if ``--json`` asks for them, otherwise the text. Returns the exit status 0."""
    print(json.dumps(facts, indent=indent) if options.json else text, flush=True)
    return 0


def add_json(parser: Any) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_ledger(parser: Any, summary: str = "the ledger's address") -> None:
    """Declare ``--ledger``."""
    parser.add_argument("--ledger", default="sqlite:///dpicl-budget.db", help=summary)


def add_witness(parser: Any) -> None:
    """Declare ``--witness``."""
    parser.add_argument("--witness", metavar="PATH", help="the ledger's witness: a path or a URL (default: beside it)")


def add_private_data(parser: Any, input_key: str, output_key: str) -> None:
    """Declare the file with the private examples and its keys, and the budget that protects them."""
    parser.add_argument("--data", required=True, help="private examples: JSON lines or CSV, plain or .gz")
    parser.add_argument("--input-key", default=input_key)
    parser.add_argument("--output-key", default=output_key)
    parser.add_argument("--owner-key", help="names the owner of a record (default: each record is its own owner)")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, help="default: the budget's; for a new one .1 / number of owners")
    add_ledger(parser, "counts what is spent")
    add_witness(parser)
    parser.add_argument("--name", help="the budget's name in the ledger (default: the file's name)")


def add_ensemble(parser: Any, members: int, shots: int) -> None:
    """Declare how many calls answer, and with how many examples each."""
    parser.add_argument("--members", type=int, default=members, help=f"parallel calls per answer (default {members})")
    parser.add_argument("--shots", type=int, default=shots, help=f"expected examples per call (default {shots})")


def add_model(parser: Any, default: str) -> None:
    """Declare the model: an embedded one, or one on a server."""
    parser.add_argument("--model", help=f"an embedded model, or a server's model (default: {default})")
    parser.add_argument("--model-url", help="an OpenAI-compatible server; its key is read from OPENAI_API_KEY")


def add_prices(parser: Any) -> None:
    """Declare the prices of tokens."""
    parser.add_argument("--price-in", type=float, default=0.0, help="the price of a million prompt tokens")
    parser.add_argument("--price-out", type=float, default=0.0, help="the price of a million answer tokens")

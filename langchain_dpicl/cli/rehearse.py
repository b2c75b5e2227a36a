"""The command ``rehearse``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from langchain_dpicl.cli import add_reading, add_run, show
from langchain_dpicl.cli.data import read_file
from langchain_dpicl.errors import InvalidParameter


def rehearse_options(parser: Any) -> None:
    """Run the chain of a server's configuration on public examples: each prompt, output, error and time. Nothing is
    charged, no plan is frozen, and no private record is shown to the chain.

    examples:
      dpicl rehearse --config server.yaml --examples public.jsonl --question "My card was charged twice"
      dpicl rehearse --config server.yaml --example '{"text": "Where is my card?", "label": "billing"}' \\
        --question '{"text": "My card was charged twice", "language": "en"}' --json

    The exit status is 1 if a call would abstain.
    """
    add_run(parser, rehearse)
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML or TOML, as for `dpicl serve`")
    parser.add_argument("--path", help="which of its releases is rehearsed, if it has several")
    parser.add_argument("--examples", metavar="FILE", help="public examples: JSON lines or CSV with the store's keys")
    parser.add_argument(
        "--example", metavar="JSON", action="append", default=[], help="one public example; may be repeated"
    )
    parser.add_argument("--question", required=True, help="a text, or a JSON object with the keys of a request")
    add_reading(parser)


def rehearse(options: argparse.Namespace) -> int:
    """Rehearse every sealed release of the chain."""
    from langchain_dpicl import SealedRelease
    from langchain_dpicl.release.base import releases_in
    from langchain_dpicl.serving.config import read
    from langchain_dpicl.store.datacheck import NO_KEYS
    from langchain_dpicl.store.records import RecordKeys

    served = read(options.config)
    settings = served.at(options.path)
    if options.examples and settings.store is not None:
        for private in filter(None, (settings.store.file, settings.store.data)):
            path = settings.folder / private
            if path.exists() and Path(options.examples).exists() and os.path.samefile(options.examples, path):
                raise InvalidParameter("--examples", options.examples, "another file than the store's: that is private")
    examples = [_object("--example", text) for text in options.example]
    about = settings.store
    keys = NO_KEYS if about is None or about.data is None else RecordKeys(about.input_key, about.output_key, None)
    examples += read_file(options, options.examples, keys) if options.examples else []
    if not examples:
        raise InvalidParameter("--examples", None, "a file of public examples, or at least one --example")
    is_object = options.question.lstrip().startswith("{")
    question: Any = _object("--question", options.question) if is_object else options.question
    releases = [part for part in releases_in(served.chains()[settings.path]) if isinstance(part, SealedRelease)]
    if not releases:
        raise InvalidParameter("config", options.config, "a chain with a sealed release, which has members to rehearse")
    if isinstance(question, str) and settings.chain is None:
        question = {releases[0].store.input_key: question}  # as the server's requests have it
    reports = [release.rehearse(examples, question) for release in releases]
    facts = [{"release": repr(release), **report.facts} for release, report in zip(releases, reports, strict=True)]
    passed = all(report.passed for report in reports)
    show(options, {"passed": passed, "rehearsals": facts}, "\n\n".join(map(str, reports)))
    return 0 if passed else 1


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidParameter(name, text, 'a JSON object, such as {"text": "...", "label": "..."}')
    return found

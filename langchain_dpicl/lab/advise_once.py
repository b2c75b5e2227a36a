"""The command ``advise`` for questions about documents: ``--topics`` and ``--values`` in the place of ``--labels``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from langchain_dpicl.cli import show
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.advice import MOST
from langchain_dpicl.lab.advice_once import (
    FAQ,
    TABLE,
    VOTES,
    Forecast,
    Inquiry,
    TableBars,
    forecasts,
    table_bars,
    taken,
    terms_from,
    usual_epsilon,
)
from langchain_dpicl.privacy.advice import POOR

_WHAT = {
    TABLE: "It counts once what all documents say: listed values under listed topics. It then answers any number of "
    "questions, without a call of a model.",
    FAQ: "Each listed question is answered once by votes of a model's calls (wrap_rag), and the answers become an "
    "ordinary collection, which any chain searches for any number of questions.",
    VOTES: "Each question is answered by votes of a model's calls (wrap_rag) when it is asked. With tickets an owner "
    "pays only for what its documents are near to.",
}

_CODE = {
    TABLE: 'release_table(store, topics, values, PrivacyBudget({epsilon:g}, {delta!r}, {{"sum": 1}}))',
    FAQ: "release_collection(wrap_rag(chain, store, candidates, PrivacyBudget({epsilon:g}, {delta!r}, {topics}, "
    'name="faq")), topics)',
    VOTES: "wrap_rag(chain, store, candidates, PrivacyBudget({epsilon:g}, {delta!r}, {questions}))",
}

_OF_LABELS = {
    "labels": None,
    "public": None,
    "write": None,
    "method": None,
    "fits": 1,
}
"""The options of advice for labels, and their defaults."""


def advise_once(options: argparse.Namespace, owners: int) -> int:
    """Compare, and print."""
    for name, default in _OF_LABELS.items():
        if (value := getattr(options, name)) != default:
            raise InvalidParameter(f"--{name}", value, "left out with --topics")
    if options.values is None:
        raise InvalidParameter("--values", None, "given with --topics: how many values an answer may have")
    delta = 0.1 / owners if options.delta is None else options.delta
    near = 1.0 / max(options.topics, 1) if options.near is None else options.near
    inquiry = Inquiry(owners, options.topics, _numbers(options.values), options.questions, delta, near, options.calls)
    epsilon = usual_epsilon(inquiry) if options.epsilon is None else options.epsilon
    found = forecasts(inquiry, epsilon)
    best = taken(found, epsilon)
    bars = table_bars(inquiry, epsilon)
    terms = terms_from(inquiry, epsilon)
    facts: dict[str, Any] = {
        "owners": owners,
        "topics": inquiry.topics,
        "values": list(inquiry.values),
        "cells": inquiry.cells,
        "questions": inquiry.questions,
        "epsilon": epsilon,
        "delta": delta,
        "recommended": None if best is None else best.method,
        "methods": [
            {
                "method": each.method,
                "feasible": each.feasible,
                "noise_takes": 1.0 - each.left,
                "model_calls": each.model_calls,
                "parameter": each.parameter,
            }
            for each in found
        ],
        "owners_per_topic": near * owners,
        "table_sigma": bars.sigma,
        "table_known_from": bars.known_from,
        "terms_from": terms,
    }
    if best is not None:
        facts["code"] = _CODE[best.method].format(**facts)
    return show(options, facts, _words(inquiry, found, best, bars, facts))


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of values of a table's columns: "22", or "19,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidParameter("--values", text, 'a number, or one for each column: "19,3"')
    return tuple(map(int, parts))


def _words(
    inquiry: Inquiry, found: Sequence[Forecast], best: Forecast | None, bars: TableBars, facts: dict[str, Any]
) -> str:
    epsilon = facts["epsilon"]
    lines = [f"Nothing fits at epsilon {epsilon:g}: noise would take more than {1 - POOR:.0%} of each of these."]
    if epsilon > MOST:
        lines = [f"Nothing is recommended at epsilon {epsilon:g}: it hardly bounds what is told about a person."]
    if best is not None:
        article = "" if best.method == VOTES else "a "
        lines = [f"Take: {article}{best.method}, at epsilon {epsilon:g} and delta {inquiry.delta:.3g}.", ""]
        lines += _folded(_WHAT[best.method], "  ")
        lines += _folded(f"Noise takes about {1.0 - best.left:.0%} of what the documents bring.", "  ")
        lines += ["", f"  {facts['code']}"]
    values = " and ".join(map(str, inquiry.values))
    lines += [
        "",
        f"{inquiry.owners:,} owners, {inquiry.topics:,} topics by {values} values, {inquiry.questions:,} questions, "
        f"epsilon {epsilon:g}, delta {inquiry.delta:.3g}:",
        "",
        "            noise  calls of a  number of",
        "            takes  model, all    answers",
    ]
    for each in found:
        takes = f"{1.0 - each.left:.0%}" if each.feasible else "too much"
        last = f"{inquiry.questions:,}" if each.method == VOTES else "any"
        mark = "  <-" if each is best else ""
        lines.append(f"  {each.method:5} {takes:>9}  {each.model_calls:>10,}  {last:>9}{mark}")
    lines += ["", "Reasons:"]
    for said in _reasons(inquiry, bars, facts):
        lines += _folded(said, "    ", "  - ")
    return "\n".join(lines)


def _reasons(inquiry: Inquiry, bars: TableBars, facts: dict[str, Any]) -> list[str]:
    return [
        f"table: a topic has about {facts['owners_per_topic']:.3g} owners (--near says another share of all). The "
        f"noise of a count has a standard deviation of {bars.sigma:.2g} owners. A value is known, by a bar over all "
        f"{inquiry.cells:,} cells, from about {bars.known_from:.2g} owners on who say it alone; with fewer, the first "
        "value may still be right, and is called not known.",
        f"FAQ: it answers the {inquiry.topics:,} listed questions and those that mean one of them. What it has not "
        "listed it cannot answer.",
        "votes: each question shares epsilon with all that are asked after it. Take them for what cannot be listed.",
        "Nobody can list topics or values? Terms can be released first: one that about "
        f"{facts['terms_from']:.2g} owners share comes out at this epsilon (release_terms).",
        "What noise takes is a rule that was fitted to other results. Measured on one study (results/rag of the source "
        "archive), noise took up to 7 points more of tables than it says, up to 11 of votes, and of a FAQ 5 and 10 at "
        "epsilon 3 and 1, but 33 at .3: where the model's answers are split, doubt a small share at a small epsilon.",
    ]


def _folded(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first or indent, subsequent_indent=indent)

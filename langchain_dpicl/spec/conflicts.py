"""Conflicts between a configuration's sections, found also beside other mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from langchain_dpicl.aggregators import KINDS
from langchain_dpicl.spec.releases import DOCUMENTS, RENAMED, SECTIONS, kind_of, of_today

_FILES = {"store": ("file", "data"), "head": ("file",)}
"""The fields that name a file which must be there."""


def conflicts(values: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each mistake: its field ("" for the file as a whole), and words. ``values`` are as in the file."""
    given = {name: part for name, part in values.items() if part is not None}
    if isinstance(given.get("head"), str):
        given["head"] = {"file": given["head"]}
    parts: dict[str, Mapping[str, Any]] = {
        name: {key: each for key, each in part.items() if each is not None} if isinstance(part, Mapping) else {}
        for name in ("store", "head", "release", "selector", "budget", "model", "server")
        for part in (given.get(name),)
    }
    whole = next((name for name in ("chain", "head") if name in given), None)
    if whole is not None:
        described = {"chain", "head", "store", "release", "budget", "selector"} - {whole}
        described |= {"model"} if "chain" in given else set()
        if described := described & given.keys():
            yield "", f"{whole} stands alone: leave out {', '.join(sorted(described))}"
    elif missing := [name for name in ("store", "release", "budget") if name not in given]:
        yield "", f"missing: {', '.join(missing)} (or head, or chain)"
    if "head" in given and parts["server"].get("input_key") is not None:
        yield "", "leave out server.input_key: the head's file has it"
    kind = kind_of(values.get("release"))
    if kind in RENAMED:
        yield "release.kind", renamed(kind)
    needs_no_model = kind in SECTIONS and SECTIONS[kind].task == "none"
    if needs_no_model and "model" in given and not isinstance(parts["release"].get("prior"), str | list):
        yield "", f"leave out model: a {kind} asks none"
    for section, field in (("model", "max_concurrency"), ("model", "timeout"), ("selector", "count_empty")):
        if field in parts[section] and (needs_no_model or "head" in given):
            yield "", f"leave out {section}.{field}: no member is called"
    if needs_no_model and parts["budget"].get("on_exhausted") == "zero_shot":
        yield "", "leave out budget.on_exhausted: no member could answer"
    own_calls = "calls" in parts["selector"] and "max_calls" not in parts["selector"]
    if own_calls and kind in KINDS and not KINDS[kind].takes_own_calls:
        yield "", f"leave out selector.calls, or give max_calls: a {kind} is proved for outputs that are replaced alone"
    if kind == DOCUMENTS:
        yield from _of_documents(parts)
    if parts["budget"].get("tickets") is True and {"threshold", "filter"}.isdisjoint(parts["selector"]):
        yield "", "budget.tickets needs selector.threshold (-1 makes every owner eligible) or filter, and eligible"
    for section, fields in _FILES.items():
        for field in fields:
            name = parts[section].get(field)
            if (section, field) == ("store", "file") and parts[section].get("data") is not None:
                continue  # it keeps the embeddings of the data, and is made at first
            if isinstance(name, str) and not (folder / Path(name)).exists():
                yield f"{section}.{field}", f"there is no {name!r} (paths are relative to the configuration)"


def renamed(kind: str) -> str:
    """Say which name a kind has now."""
    today = of_today(kind)
    more = " with scores: true" if "scores" in today else ""
    return f'"{kind}" is now "{today["kind"]}"{more}; dpicl upgrade FILE rewrites it'


def _of_documents(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    release, selector, model, budget = (parts[name] for name in ("release", "selector", "model", "budget"))
    unused = {"store": {"output_key"}, "model": {"max_concurrency", "timeout"}}
    unused["selector"] = {"pad_to", "max_calls", "count_empty"}
    for section, names in unused.items():
        for name in sorted(names & parts[section].keys()):
            yield "", f"leave out {section}.{name}: documents are shown to no member"
    if {"api_key_env", "name"} <= model.keys() and "url" not in model:
        yield "", "leave out model.api_key_env without model.url: a model in a file has no key"
    if {"calls", "shots", "rate"}.isdisjoint(selector):
        yield "", "documents need selector.calls (or rate, with release.shots)"
    elif {"calls", "shots"}.isdisjoint(selector) and "shots" not in release:
        yield "", "documents need release.shots beside selector.rate: how many owners a sample has"
    if ("url" in model) != ("end" in release):
        yield "", "documents need release.end, the end tokens, with model.url, and only then"
    tokens, tickets = release.get("max_tokens", 25), budget.get("releases")
    if budget.get("tickets") is True and type(tokens) is type(tickets) is int and tokens > tickets:
        yield "", "budget.releases, every owner's tickets, are tokens: at least release.max_tokens of them"

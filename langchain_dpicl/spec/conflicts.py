"""Conflicts between a configuration's sections, found also beside other mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from langchain_dpicl.aggregators import KINDS
from langchain_dpicl.spec.releases import DOCUMENTS, RENAMED, SECTIONS, kind_of, of_today

Conflict = tuple[str, str]
"""Its field ("" for the description as a whole), and words."""

_FILES = {"store": ("file", "data"), "head": ("file",)}
"""The fields that name a file which must be there."""
_ALONE = {"releases": {"budget"}, "chain": set[str](), "head": {"model"}}
"""The sections that stand alone, each with those that may be beside it."""
_DESCRIBED = {*_ALONE, "store", "release", "budget", "selector", "model"}
_TAKEN = ("/health", "/ready", "/metrics", "/openapi.json")
_OF_EACH = ("path", "input_key", "ready_question")
"""The server's settings that each of several releases has for itself."""


def conflicts(values: Mapping[str, Any], folder: Path) -> Iterator[Conflict]:
    """Yield each mistake. ``values`` are as in the file."""
    given = {name: part for name, part in values.items() if part is not None}
    if "folder" in given:
        yield "folder", "not a section"
    whole = next((name for name in _ALONE if name in given), None)
    if whole is not None:
        if described := (_DESCRIBED - _ALONE[whole] - {whole}) & given.keys():
            yield "", f"{whole} stands alone: leave out {', '.join(sorted(described))}"
    elif missing := [name for name in ("store", "release", "budget") if name not in given]:
        yield "", f"missing: {', '.join(missing)} (or head, or chain)"
    yield from _unknown_names(given)
    if whole == "releases":
        yield from _of_several(given, folder)
    else:
        yield from _of_one(given, folder)


def _of_one(given: dict[str, Any], folder: Path) -> Iterator[Conflict]:
    if isinstance(given.get("head"), str):
        given["head"] = {"file": given["head"]}
    parts: dict[str, Mapping[str, Any]] = {
        name: {key: each for key, each in part.items() if each is not None} if isinstance(part, Mapping) else {}
        for name in ("store", "head", "release", "selector", "budget", "model", "server")
        for part in (given.get(name),)
    }
    if "head" in given and parts["server"].get("input_key") is not None:
        yield "", "leave out server.input_key: the head's file has it"
    kind = kind_of(given.get("release"))
    if kind in RENAMED:
        yield "release.kind", renamed(kind)
    if isinstance(parts["budget"].get("releases"), Mapping):
        yield "budget.releases", "a number: a release has one line"
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


def _of_several(given: dict[str, Any], folder: Path) -> Iterator[Conflict]:
    """Yield the mistakes in each of several releases, and those between them."""
    server = _mapping(given.get("server"))
    for name in _OF_EACH:
        if name in server:
            yield f"server.{name}", "left out beside releases: each has its own"
    common = _mapping(given.get("budget"))
    each = [_mapping(entry) for entry in given["releases"]] if isinstance(given["releases"], list) else []
    paths = [str(entry.get("path")).rstrip("/") for entry in each]
    lines = []
    kept: dict[str, tuple[object, ...]] = {}
    names = [common.get("name", "default")] if common else []
    for place, (entry, path) in enumerate(zip(each, paths, strict=True)):
        here = f"releases[{place}]"
        if any(path == other or path.startswith(f"{other}/") for other in [*paths[:place], *paths[place + 1 :]]):
            yield f"{here}.path", "a path of its own, and none below another release's"
        where, keys = _kept(entry)
        if kept.setdefault(where, keys) != keys:
            yield f"{here}.store.file", "a file of its own: another release keeps the same data there by other keys"
        if path in _TAKEN:
            yield f"{here}.path", f"none of {', '.join(_TAKEN)}"
        own = {**entry, "keys": given.get("keys", {})}
        if "budget" in own:
            name = _mapping(own["budget"]).get("name", line_of(path))
            if name in names:
                yield f"{here}.budget.name", "a name of its own (or one budget beside releases, for all of them)"
            names.append(name)
        elif common and own.keys().isdisjoint(("chain", "head")):
            lines.append(line_of(path))
            own["budget"] = {**common, "releases": None, "quota": None}
        for field, words in conflicts(own, folder):
            if field == "release.kind":
                words = words.partition(";")[0]  # `dpicl upgrade` looks for one release
            yield f"{here}.{field}".rstrip("."), words
    counts = common.get("releases")
    if common and not lines:
        yield "", "leave out budget: each of the releases has its own"
    elif common and (not isinstance(counts, Mapping) or counts.keys() != set(lines)):
        yield "budget.releases", f"a number for each path without a budget of its own: {', '.join(lines)}"
    if common.get("tickets") is True:
        yield "budget.tickets", "left out: owners pay with the tickets of one release, which needs a budget of its own"


def _unknown_names(given: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield the names of callers that no key has. What a file of keys holds may change, and is not looked at."""
    keys, callers, quota = given.get("keys", {}), given.get("callers"), _mapping(given.get("budget")).get("quota")
    if not isinstance(keys, Mapping):
        return
    named = {f"callers[{place}]": name for place, name in enumerate(callers if isinstance(callers, list) else [])}
    named |= {"callers": callers} if isinstance(callers, str) else {}
    named |= {f"budget.quota.{name}": name for name in _mapping(quota)}
    for place, name in named.items():
        if not any(name == each for each in keys):
            yield place, "a name under keys"


def _kept(entry: Mapping[str, Any]) -> tuple[str, tuple[object, ...]]:
    """Return the place where a release's examples are kept, and the keys that they are kept by."""
    store = _mapping(entry.get("store"))
    place = [store.get(name) for name in ("file", "url", "name")]
    if place[:2] == [None, None]:
        place = [store.get("data")]
    output = None if kind_of(entry.get("release")) == DOCUMENTS else store.get("output_key", "label")
    return str(place), (store.get("input_key", "text"), output, store.get("owner_key"))


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}


def line_of(path: str) -> str:
    """Return the name of a path's line on a budget of several, and of its own budget unless it has another."""
    return path.strip("/")


def renamed(kind: str) -> str:
    """Say which name a kind has now."""
    today = of_today(kind)
    more = " with scores: true" if "scores" in today else ""
    return f'"{kind}" is now "{today["kind"]}"{more}; dpicl upgrade FILE rewrites it'


def _of_documents(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[Conflict]:
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

"""Mistakes in a configuration: each is refused with its place, beside all others, and before anything is made."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from serving_files import VOTE, file_of, merged
from serving_files import models as models

from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter
from langchain_dpicl.serving.config import MetricsSection, ServerSection, read
from langchain_dpicl.spec import SECTIONS
from langchain_dpicl.spec.description import BudgetSection, SelectorSection
from langchain_dpicl.spec.sources import HeadSection, ModelSection, StoreSection

MEDIAN = {"kind": "median", "low": 0, "high": 9}
SERVED = {"url": "http://127.0.0.1:9/v1", "name": "m"}


def changed(changes: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**merged(VOTE, changes), **sections}


def told(content: Any, folder: Path) -> dict[str, str]:
    """The mistakes of a file: of each its place, and words. Nothing is made beside it."""
    path = file_of(folder, content)
    before = sorted(folder.iterdir())
    with pytest.raises(InvalidConfiguration) as caught:
        read(path)
    assert sorted(folder.iterdir()) == before
    found = dict(caught.value.mistakes)
    assert len(found) == len(caught.value.mistakes), "one place is told twice"
    return found


# -- a value is of its own type ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"budget.releases": True}, "budget.releases"),
        ({"budget.releases": 30.0}, "budget.releases"),
        ({"budget.epsilon": "3"}, "budget.epsilon"),
        ({"budget.epsilon": True}, "budget.epsilon"),
        ({"budget.epsilon": 10**400}, "budget.epsilon"),
        ({"budget.replay": 1}, "budget.replay"),
        ({"budget.replay_patience": "5"}, "budget.replay_patience"),
        ({"store.skip_bad": "yes"}, "store.skip_bad"),
        ({"server.port": "8000"}, "server.port"),
        ({"server.page": 1}, "server.page"),
        ({"server.max_batch": "3"}, "server.max_batch"),
        ({"server.body_seconds": "3"}, "server.body_seconds"),
        ({"server.grace_seconds": 3.0}, "server.grace_seconds"),
        ({"selector.count_empty": 0}, "selector.count_empty"),
        ({"release.prior": {"a": "0.5"}}, "release.prior.a"),
        ({"release": {**MEDIAN, "low": "0"}}, "release.low"),
        ({"release": {"kind": "mean", "low": "0", "high": 9}}, "release.low"),
        ({"release": {**MEDIAN, "low": "20260101"}}, "release.low"),
        ({"release": {**MEDIAN, "low": "2026-01-01T00:00:00"}}, "release.low"),
        ({"release": {**MEDIAN, "low": "2026-02-30"}}, "release.low"),
        ({"release": {"kind": "ptr", "k": ["2", 4]}}, "release.k[0]"),
        ({"release": {"kind": "ptr", "k": [2, True]}}, "release.k[1]"),
        ({"release": {"kind": "ptr", "k": [2, 4.0]}}, "release.k[1]"),
        ({"release": {"kind": "structured", "fields": {"a": {**MEDIAN, "weight": "2"}}}}, "release.fields.a.weight"),
        ({"release": {"kind": "structured", "fields": {"a": {"optional": "no"}}}}, "release.fields.a.optional"),
        ({"release": {"kind": "structured", "fields": {"a": {"low": "0", "high": 9}}}}, "release.fields.a.low"),
    ],
)
def test_nothing_is_converted(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    assert place in told(changed(changes), tmp_path)


NUMBERS = """
store: {data: tickets.jsonl}
release: {kind: median, low: %s, high: %s}
budget: {epsilon: 3, delta: %s, releases: 30}
"""


@pytest.mark.parametrize("delta", ["1e-6", "1E-6", "1.e-6", "1.0e-6", "0.000001", ".1e-5"])
def test_a_number_may_be_written_in_every_way_of_yaml_and_json(delta: str, tmp_path: Path) -> None:
    budget = read(file_of(tmp_path, NUMBERS % (0, 9, delta))).budget
    assert budget is not None
    assert (budget.epsilon, type(budget.epsilon), budget.delta) == (3.0, float, 1e-6)
    assert "budget.delta" in told(NUMBERS % (0, 9, f'"{delta}"'), tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "made"),
    [
        ("2026-01-01", "2026-01-31", date),
        ('"2026-01-01"', '"2026-01-31"', date),
        ("0", "9", int),
        ("0", "9.0", float),
        ("1e-1", "9", float),
    ],
)
def test_bounds_are_whole_numbers_numbers_or_dates(low: str, high: str, made: type, tmp_path: Path) -> None:
    release: Any = read(file_of(tmp_path, NUMBERS % (low, high, "1e-6"))).release
    assert release.aggregator().release_type is made


def test_a_date_and_time_is_no_date(tmp_path: Path) -> None:
    assert "release.low" in told(NUMBERS % ("2026-01-01 00:00:00", "2026-01-31", "1e-6"), tmp_path)


# -- all at once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "fields"),
    [
        ({**MEDIAN, "high": 0, "decimal": "x"}, {"high", "decimal"}),
        ({**MEDIAN, "points": 1, "decimal": "x", "max_tokens": 0}, {"points", "decimal", "max_tokens"}),
        ({"kind": "vote", "labels": ["a", "b"], "lead": 3, "mechanism": "x", "prior": {"c": 1}, "instruction": 4},
         {"lead", "mechanism", "prior", "instruction"}),
        ({"kind": "ptr", "k": 0, "delta0": 2, "select": -1}, {"k", "delta0", "select"}),
        ({"kind": "structured", "decimal": "x", "fields": {
            "a": {"low": 3, "high": 3}, "b": {"choices": ["x", "X"]}, "c": {"low": 0, "high": 9}}},
         {"decimal", "fields.a", "fields.b"}),
        ({"kind": "structured", "fields": {"a": {"low": 3, "high": 3}, "copy": {"choices": ["x", "y"]}}},
         {"fields.a", "fields.copy"}),
        ({"kind": "structured", "decimal": "x", "fields": {"a": {"low": "3", "high": 3}, "b": {"weight": 0}}},
         {"fields.a.low", "fields.b.weight"}),
    ],
)  # fmt: skip
def test_all_mistakes_of_a_release_are_told_with_those_of_the_other_sections(
    release: dict[str, Any], fields: set[str], tmp_path: Path
) -> None:
    others = {"selector": {"members": 1, "exemplars_per_owner": 0}, "budget.soft_limit": 2, "server.max_batch": 99}
    found = told(changed({**others, "server.body_seconds": 0, "release": release}), tmp_path)
    assert found.keys() == {
        *(f"release.{field}" for field in fields), "selector.members", "selector.exemplars_per_owner",
        "budget.soft_limit", "server.max_batch", "server.body_seconds",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"store": {"data": 3}}, {"store.data"}),  # and not that none is given
        ({"release": {"kind": "documents", "max_tokens": 0, "min_tokens": 30}, "selector": {"calls": 3}},
         {"release.max_tokens"}),  # and not that min_tokens is above the default
        ({"release.scores": "yes", "release.mechanism": "scores"}, {"release.scores"}),
        ({"selector": {"calls": 3, "threshold": "near", "eligible": 20}}, {"selector.threshold"}),
        ({"release": {"kind": "embedding", "candidates": 3, "n_candidates": 4}}, {"release.candidates"}),
    ],
)  # fmt: skip
def test_what_may_follow_from_a_mistake_is_not_told_as_another(
    changes: dict[str, Any], places: set[str], tmp_path: Path
) -> None:
    assert told(changed(changes), tmp_path).keys() - {"server.yaml"} == places


# -- before anything is made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"release.prior": []}, "release.prior"),
        ({"release.prior": ["good", " "]}, "release.prior[1]"),
        ({"release.content_free": []}, "release.content_free"),
        ({"model": {**SERVED, "timeout": 10**400}}, "model.timeout"),
        ({"model": {**SERVED, "timeout": True}}, "model.timeout"),
        ({"metrics": {"key": "CANARY"}}, "metrics.key"),
        ({"server.title": " "}, "server.title"),
        ({"selector": {"calls": 6, "count_empty": True}}, "selector.count_empty"),
        ({"budget.name": ""}, "budget.name"),
        ({"budget.ledger": "CANARY"}, "budget.ledger"),
        ({"budget.ledger": "sqlite:///CANARY\0.db"}, "budget.ledger"),
        ({"budget.witness": "CANARY\0"}, "budget.witness"),
        ({"store.file": "CANARY\0.npz"}, "store.file"),
        ({"store.input_key": ""}, "store.input_key"),
        ({"release": {"kind": "documents", "stop": ["."] * 2 + [""]}, "selector.calls": 3}, "release.stop"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    changes: dict[str, Any], place: str, tmp_path: Path
) -> None:
    found = told(changed(changes), tmp_path)
    assert place in found
    assert "CANARY" not in found[place]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"release.kind": "label-vote", "selector.count_empty": True}, "leave out selector.count_empty"),
        ({"release.kind": "label-vote", "budget.on_exhausted": "zero_shot"}, "leave out budget.on_exhausted"),
        ({"release.kind": "label-vote", "release.prior": ["x"], "model.timeout": 3}, "leave out model.timeout"),
        ({"release.kind": "label-vote", "release.prior": ["x"], "model.max_concurrency": 3}, "model.max_concurrency"),
        ({"release": {"kind": "ptr", "k": 3}, "selector": {"calls": 5}}, "leave out selector.calls"),
    ],
)
def test_what_does_not_go_with_a_kind_is_refused_before_anything_is_made(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in told(changed(changes), tmp_path)["server.yaml"]


@pytest.mark.parametrize(
    "url",
    ["http://a\0b/v1", "http://a:b/v1", "http://a b/v1", "nonsense", "", "ftp://a/v1", "http://", "http://1.2.3.999/",
     "http://[1.2.3.4]/", "http://a\n"],
)  # fmt: skip
def test_an_address_for_which_no_client_can_be_made_is_refused_at_its_place(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, changed({"model": {"url": url, "name": "m"}}))
    assert main(["serve", "--config", str(path), "--check"]) == 1
    assert "model.url: an address such as" in capsys.readouterr().err
    assert not (tmp_path / "budget.db").exists()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/v1", "https://u:p@a.b/v1?x=1", "http://[::1]:8/v1", "http://my_vm"]
)
def test_an_address_for_which_a_client_can_be_made_is_read(url: str, tmp_path: Path) -> None:
    assert read(file_of(tmp_path, changed({"model": {"url": url, "name": "m"}}))).model.choice.load() is not None


@pytest.mark.parametrize("content_free", ["x", ["x"]])
def test_a_release_is_made_before_its_ledger(
    content_free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is refused then, refuses without a ledger's files."""
    wrong = InvalidParameter("labels", "(not shown)", "others")

    def refuse(*given: Any, **more: Any) -> Any:
        raise wrong

    monkeypatch.setattr("langchain_dpicl.members.chains.LabelScorer", refuse)
    settings = read(file_of(tmp_path, changed({"release.content_free": content_free})))
    with pytest.raises(InvalidParameter) as caught:
        settings.build()
    assert caught.value is wrong
    assert not list(tmp_path.glob("budget.db*"))


# -- what would be ignored ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"release": {"kind": "structured", "fields": {"a": {"choices": ["x", "y"]}}, "decimal": ","}},
         "release.decimal"),
        ({"release": {"kind": "median", "low": "2026-01-01", "high": "2026-01-02", "decimal": ","}}, "release.decimal"),
        ({"release": {"kind": "candidate-vote", "candidates": ["x", "y"], "n_candidates": 20}}, "release.n_candidates"),
        ({"release": {"kind": "embedding", "candidates": ["x", "y"], "n_candidates": 20}}, "release.n_candidates"),
        ({"release": {"kind": "ptr", "k": 3, "select": 1.0}}, "release.select"),
        ({"release.scores": True, "release.lead": 0.3}, "release.lead"),
        ({"budget.replay": False, "budget.replay_patience": 300.0}, "budget.replay_patience"),
        ({"model": {"api_key_env": "OPENAI_API_KEY"}}, "model.api_key_env"),
        ({"store": {"file": "tickets.jsonl", "input_key": "text"}}, "store.input_key"),
    ],
)  # fmt: skip
def test_a_setting_without_any_use_is_refused_in_a_file(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    assert told(changed(changes), tmp_path)[place].startswith("left out")


def test_all_settings_without_any_use_are_told(tmp_path: Path) -> None:
    store = {"file": "tickets.jsonl", "owner_key": "who", "skip_bad": True, "name": "x", "vectors_in_memory": False}
    budget = {"tickets": True, "soft_limit": 0.5, "replay": False, "replay_patience": 3}
    found = told(changed({f"budget.{name}": value for name, value in budget.items()}, store=store), tmp_path)
    assert found.keys() - {"server.yaml"} == {
        *(f"store.{name}" for name in store if name != "file"), "budget.soft_limit", "budget.replay_patience",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"budget.replay_patience": 3},
        {"model": {"name": "gpt-4.1-mini", "api_key_env": "MINE"}},
        {"model": {**SERVED, "api_key_env": "MINE"}},
        {"release": {"kind": "structured", "fields": {"a": {"low": 0, "high": 9}}, "decimal": ","}},
        {"release": {"kind": "embedding", "n_candidates": 3}},
        {"release": {"kind": "ptr", "k": [3, 4], "select": 2}},
    ],
)
def test_the_same_settings_are_read_where_they_have_a_use(changes: dict[str, Any], tmp_path: Path) -> None:
    assert read(file_of(tmp_path, changed(changes))).release is not None


def test_an_embedding_in_a_file_asks_for_fewer_candidates_than_in_python(tmp_path: Path) -> None:
    release: Any = read(file_of(tmp_path, changed({"release": {"kind": "embedding"}}))).release
    assert release.aggregator().n_candidates == 20


# -- places, and null --------------------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "store": StoreSection, "head": HeadSection, "model": ModelSection, "selector": SelectorSection,
    "budget": BudgetSection, "server": ServerSection, "metrics": MetricsSection,
}  # fmt: skip
ODD: Any = {"odd": [{"surely": None}]}


def assert_in_file(place: str, content: Any) -> None:
    """Walk to a place; only its last name may be missing."""
    parts = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", place)]
    for part in parts[:-1]:
        content = content[part]
    assert isinstance(content, dict | list), place
    assert not isinstance(content, list) or parts[-1] in range(len(content)), place


@pytest.mark.parametrize(
    ("section", "kind", "field"),
    [
        *((name, None, field) for name, section in WHOLE.items() for field in section.model_fields),
        *(("release", kind, field) for kind, section in SECTIONS.items() for field in section.model_fields),
    ],
)
@pytest.mark.parametrize("odd", [ODD, [ODD], [[3, None]], True])
def test_the_place_of_a_mistake_is_in_the_file(
    section: str, kind: str | None, field: str, odd: Any, tmp_path: Path
) -> None:
    if (section, field, odd) == ("server", "ready_question", odd) or (field == "model" and odd is True):
        odd = ODD
    content = {**VOTE, section: {"kind": kind, field: odd} if kind else {field: odd}}
    if section == "server" and field == "ready_question":
        content[section]["surprise"] = odd  # a question may be anything
        field = "surprise"
    path = file_of(tmp_path, json.dumps(content))
    try:
        read(path)
    except InvalidConfiguration as error:
        places = [place for place, _ in error.mistakes if place != "server.yaml"]
    else:
        assert odd is True, "it was accepted"
        return
    for place in places:
        assert_in_file(place, content)
    if odd is not True:
        assert any(place == f"{section}.{field}" or place.startswith((f"{section}.{field}.", f"{section}.{field}["))
                   for place in places), places  # fmt: skip


@pytest.mark.parametrize("kind", ["CANARY", 3, None, ["vote"], True])
def test_a_kind_that_is_none_is_told_at_its_place_without_its_value(kind: object, tmp_path: Path) -> None:
    found = told(changed({}, release={"kind": kind, "labels": ["a", "b"]}), tmp_path)
    assert found.keys() == {"release.kind"}
    assert found["release.kind"].startswith("one of vote, ")


@pytest.mark.parametrize(
    ("keys", "place"),
    [(["m"], "keys"), (3, "keys"), ({"a": 3}, "keys.a"), ({"a": ["x", 3]}, "keys.a[1]"), (None, "keys")],
)
def test_keys_that_are_none_are_told_once_and_at_their_place(keys: Any, place: str, tmp_path: Path) -> None:
    assert told(changed({}, keys=keys), tmp_path).keys() == {place}


@pytest.mark.parametrize("kind", [kind for kind in SECTIONS if kind != "documents"])
def test_null_is_read_where_the_constructor_takes_none(kind: str, tmp_path: Path) -> None:
    """And it is then what it is in Python."""
    needed: dict[str, Any] = {"labels": ["a", "b"], "low": 0, "high": 9, "k": 2}
    needed["fields"] = {"a": {"low": 0, "high": 9}}
    fields = SECTIONS[kind].model_fields
    release = {"kind": kind, **{name: value for name, value in needed.items() if name in fields}}
    plain: Any = read(file_of(tmp_path, changed({}, release=release))).release
    for name, field in fields.items():
        if name in release or name in ("model", "fields"):
            continue
        content = changed({}, release={**release, name: None})
        if field.default is None:
            made: Any = read(file_of(tmp_path, content)).release
            assert repr(made.aggregator()) == repr(plain.aggregator())
        else:
            assert "null is no value" in told(content, tmp_path)[f"release.{name}"]


@pytest.mark.parametrize("section", ["selector", "model", "server"])
def test_an_empty_section_is_told_in_words(section: str, tmp_path: Path) -> None:
    assert "null is no value" in told(changed({}, **{section: None}), tmp_path)[section]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--content-free", "tickets.jsonl"], "--content-free="),
        (["--mode", "candidate-vote", "--candidates", "x,y", "--n-candidates", "3"], "--n-candidates="),
        (["--mode", "ptr", "--k", "3", "--select", "1.0"], "--select="),
        (["--scores", "--lead", "0.3"], "--lead="),
        (["--mode", "median", "--low", '"0"', "--high", "9"], "--low="),
        (["--model", "m", "--model-url", "http://a:b/v1"], "--model-url="),
        (["--members", "1"], "--members="),
        (["--mode", "ptr", "--k", "3", "--calls", "5"], "--calls="),
    ],
)
def test_a_mistake_on_the_command_line_is_told_by_its_option(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    labels = [] if "--mode" in more else ["--labels", "a,b"]
    command = ["answer", "--data", "tickets.jsonl", "--epsilon", "300", "--question", "x", *labels, *more]
    assert main(command) == 1
    assert f"dpicl answer: {says}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.parametrize(
    "more",
    [
        ["--low", "0", "--high", "9", "--decimal", ","],
        ["--low", "2026-01-01", "--high", "2026-01-31"],
        ["--low", "1e-1", "--high", "9"],
    ],
)
def test_options_are_read_as_a_file_would_give_them(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("langchain_dpicl.local.local_llm", lambda *_, **__: RunnableLambda(lambda _: "5"))
    own = ["--ledger", "sqlite:///own.db", "--owner-key", "who", "--accept-noise", "--members", "10", "--shots", "2"]
    command = ["answer", "--data", "tickets.jsonl", "--epsilon", "300", "--question", "x", "--mode", "median"]
    if "2026-01-01" in more:
        monkeypatch.setattr("langchain_dpicl.local.local_llm", lambda *_, **__: RunnableLambda(lambda _: "2026-01-09"))
    assert main([*command, *own, *more]) == 0

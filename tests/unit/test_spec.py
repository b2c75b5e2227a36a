"""`spec`: sections made of signatures, the kinds' names, and what a new kind needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda
from serving_files import VOTE, file_of, merged

from langchain_dpicl import NoisyVote, PoissonExampleSelector, PrivacyBudget, local
from langchain_dpicl.aggregators import KINDS
from langchain_dpicl.errors import InvalidConfiguration
from langchain_dpicl.members.chains import ModelChoice, Wording
from langchain_dpicl.serving.config import read
from langchain_dpicl.spec import SECTIONS, Spec, checked
from langchain_dpicl.spec.conflicts import RENAMED
from langchain_dpicl.spec.description import BudgetSection, SelectorSection
from langchain_dpicl.spec.releases import section_of
from langchain_dpicl.spec.signatures import described, fields_of

WORDS = Wording("text", "label")
BY_HAND = {("structured", "model")}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tickets.jsonl").touch()
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=8))


# -- what a signature gives --------------------------------------------------------------------------------------------


class Made:
    """A class.

    Parameters
    ----------
    texts
        Words for the texts,
        on two lines.
    low, high
        Both ends.

    And nothing else.
    """

    def __init__(
        self,
        texts: Sequence[str] | Runnable[Any, Any],
        low: int = 3,
        *,
        high: int | tuple[int, int] = (3, 4),
        way: Literal["this", "that"] | Sequence[str] = "this",
        function: Any = None,
        chain: Runnable[Any, Any] | None = None,
        **more: Any,
    ) -> None: ...


def test_what_a_file_can_give_becomes_a_field() -> None:
    found = fields_of(Made)
    assert list(found) == ["texts", "low", "high", "way"]
    assert {name: field.default for name, (_, field) in found.items()} == {
        "texts": None, "low": 3, "high": (3, 4), "way": "this",
    }  # fmt: skip
    assert described(Made) == {
        "texts": "Words for the texts, on two lines.", "low": "Both ends.", "high": "Both ends.",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in SECTIONS if kind in KINDS])
def test_a_kinds_fields_have_the_signatures_defaults_and_the_docstrings_words(kind: str) -> None:
    parameters = inspect.signature(KINDS[kind].constructor()).parameters
    words = described(KINDS[kind].constructor())
    for name, field in SECTIONS[kind].model_fields.items():
        assert name == "kind" or field.description, f"{kind}.{name} has no words"
        if name in parameters and (kind, name) not in BY_HAND:
            default = parameters[name].default
            assert (None if field.is_required() else field.default) == (None if default is inspect._empty else default)
            assert name in ("prior", "candidates") or field.description == words[name]


@pytest.mark.parametrize(
    ("section", "made"), [(SelectorSection, PoissonExampleSelector), (BudgetSection, PrivacyBudget)]
)
def test_selector_and_budget_take_what_a_file_can_give(section: Any, made: Any) -> None:
    known = section.model_fields.keys() - {"count_empty"}
    assert known <= inspect.signature(made).parameters.keys()


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_earlier_name_is_refused_with_the_new_one_beside_all_other_mistakes(
    old: str, new: str, tmp_path: Path
) -> None:
    changes = {"release": {"kind": old, "surprise": 3}, "budget.epsilon": -1}
    with pytest.raises(InvalidConfiguration) as caught:
        read(file_of(tmp_path, merged(VOTE, changes)))
    told = dict(caught.value.mistakes)
    assert told.keys() >= {"release.kind", "budget.epsilon", "release.surprise"}
    assert told["release.kind"].startswith(f'"{old}" is now "{new}"')
    assert told["release.kind"].endswith("dpicl upgrade FILE rewrites it")


# -- a new kind, and what stands for a chain ---------------------------------------------------------------------------


class Loudest(NoisyVote):
    """A vote of a kind that nobody knows.

    Parameters
    ----------
    volume
        How loud, from 1 to 9.
    """

    kind = "loudest"

    def __init__(self, labels: Sequence[str], *, volume: int = 5) -> None:
        super().__init__(labels)
        self.volume = volume


def test_a_new_kind_is_described_by_its_class_alone() -> None:
    section: Any = section_of(Loudest)
    assert set(section.model_fields) == {"kind", "labels", "volume", "instruction", "content_free"}
    assert section.model_fields["volume"].description == "How loud, from 1 to 9."
    made = section(kind="loudest", labels=["a", "b"], volume=7).aggregator()
    assert (type(made), made.volume) == (Loudest, 7)


NEW = """
from langchain_dpicl.aggregators import KINDS, NoisyVote

class Loudest(NoisyVote):
    '''A vote.

    Parameters
    ----------
    volume
        How loud, from 1 to 9.
    '''
    kind = "loudest"

    def __init__(self, labels: list[str], *, volume: int = 5) -> None: ...

KINDS["loudest"] = Loudest
from langchain_dpicl.cli import main

main(["answer", "--mode", "loudest", "--help"])
"""


def test_a_new_kind_has_its_options_without_an_edit() -> None:
    done = subprocess.run([sys.executable, "-c", NEW], capture_output=True, text=True, timeout=120, check=True)
    words = " ".join(done.stdout.split())
    assert "--volume VOLUME How loud, from 1 to 9 (default 5) [loudest]" in words
    assert "The public list [vote, top-k, label-vote, loudest]" in words


@pytest.mark.parametrize("kind", ["vote", "label-vote"])
def test_public_texts_as_a_prior_set_the_models_scores_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Scorer(RunnableLambda[Any, Any]):
        def prior(self, texts: list[str]) -> Any:
            asked.extend(texts)
            return RunnableLambda(lambda _: {"a": 3, "b": 1})

    monkeypatch.setattr("langchain_dpicl.members.chains.LabelScorer", lambda *_, **__: Scorer(str))
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: RunnableLambda(str))
    (tmp_path / "public.txt").write_text("one\n\ntwo\n")
    release = {"kind": kind, "labels": ["a", "b"], "prior": "public.txt"}
    settings = read(file_of(tmp_path, merged(VOTE, {"release": release, "model": {"name": "smollm2-135m-instruct"}})))
    made: Any = settings.release
    _, aggregator = made.parts(ModelChoice(), WORDS)
    assert isinstance(aggregator._chain, Runnable)
    assert asked == ["one", "two"]


@pytest.mark.parametrize("kind", [["vote"], {"vote": 1}, None, 3, True, "nope"])
def test_a_kind_that_is_none_is_told_with_all_other_mistakes(kind: object, tmp_path: Path) -> None:
    values = {
        "store": {"data": str(tmp_path / "nothing.jsonl")},
        "release": {"kind": kind, "labels": ["a", "b"]},
        "budget": {"epsilon": 0, "delta": 1e-5, "releases": 5},
    }
    made, mistakes = checked(Spec, values, tmp_path)
    assert made is None
    assert [place for place, _ in mistakes] == ["release.kind", "budget.epsilon", "store.data"]

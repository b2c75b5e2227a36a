"""What objects and files show: every repr, serialiser and schema, the bytes of the ledger."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import pprint
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from channels import (
    EXEMPLAR,
    LABELS,
    OWNER,
    QUESTION,
    Clinic,
    Tally,
    a_member,
    found_in,
    sealed_release,
    secret_records,
    secret_store,
    shown_by,
)
from langchain_core.load import dumpd, dumps
from langchain_core.runnables import RunnablePassthrough
from moments import exemplars_of
from pydantic_core import PydanticSerializationError

from langchain_dpicl import EmbeddingMean, Keywords, NoisyVote, PrivacyBudget, UnsafeConfigurationError
from langchain_dpicl.calls.flow import run
from langchain_dpicl.private.boundary import ABSTAIN, Failed, guarded
from langchain_dpicl.release.base import as_tool
from langchain_dpicl.release.transaction import charge, checked

MEMBERS = 3


@pytest.fixture(scope="module")
def store() -> Any:
    return secret_store()


@pytest.fixture(scope="module")
def release(store: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A release that has been made, so that whatever it keeps of one is there."""
    path = tmp_path_factory.mktemp("objects") / "budget.db"
    budget = PrivacyBudget(1000, 1e-5, 20, replay=False, ledger=f"sqlite:///{path}")
    made = sealed_release(store, a_member(Clinic()), Tally(LABELS, mechanism="vote"), budget, MEMBERS)
    made.invoke(QUESTION)
    yield made
    budget.close()


def objects(release: Any) -> dict[str, Any]:
    """Everything on the way of a release that a user, a debugger or an error reporter may hold."""
    ensemble, selector = release.ensemble, release.ensemble.selector
    request = checked(release, QUESTION)
    (charged,) = run(charge(release, [request]))
    private = run(guarded(release.work(charged)))
    receipt = request.line.record(charged.entry, *release.kept(charged, private)[:2])
    selector.store.load_vectors()
    with selector.store.reading() as view:
        assert len(view.numbers) > 0
    return {
        "store": selector.store,
        "the owners": selector.store.owners,
        "a view": view,
        "the vectors": selector.store._memory.matrix,
        "selector": selector,
        "buckets": selector.sample(),
        "ensemble": ensemble,
        "member": ensemble.copies.chain,
        "aggregator": release.aggregator,
        "vote": NoisyVote(LABELS),
        "mean": EmbeddingMean(selector.store.embeddings, ["a", "b"]),
        "keywords": Keywords.joint_em(["a word"], 1),
        "release": release,
        "release with receipt": release.with_receipt(),
        "chain": RunnablePassthrough() | release | RunnablePassthrough(),
        "bound": release.with_config(tags=["x"]).bind().with_retry(),
        "tool": as_tool(release, "ask", "Asks."),
        "budget": release.budget,
        "line": release.line(),
        "request": request,
        "charged": charged,
        "charge": charged.entry,
        "private": private,
        "failed": Failed(),
        "receipt": receipt,
        "abstention": ABSTAIN,
    }


def written(value: Any) -> str:
    """Every way in which Python writes an object."""
    parts = [repr(value), str(value), f"{value!r} {value!s} {value!a}", "%r %s" % (value, value), pprint.pformat(value)]  # noqa: UP031
    if type(value).__name__ != "list":  # a bucket's text is what a prompt template asks for with {examples}
        parts.append(f"{value}")
    if hasattr(value, "__dict__"):
        parts += [repr(vars(value)), pprint.pformat(vars(value))]
        parts += [repr(vars(item)) for item in vars(value).values() if hasattr(item, "__dict__")]
    for method in ("model_dump", "model_dump_json", "to_json", "_asdict"):
        if callable(give := getattr(value, method, None)):
            with contextlib.suppress(PydanticSerializationError):  # a function has no JSON
                parts.append(repr(give()))
    return "\n".join(parts)


def test_no_object_writes_a_secret(release: Any) -> None:
    assert {name: found for name, item in objects(release).items() if (found := found_in(written(item)))} == {}


def test_no_serialiser_writes_a_secret(release: Any) -> None:
    for name, item in objects(release).items():
        for serialise in (dumps, dumpd, lambda value: json.dumps(value, default=repr), pickle.dumps, copy.deepcopy):
            if name == "buckets" and serialise not in (pickle.dumps, copy.deepcopy):
                continue  # as lists they are data for the member's prompt, and nobody else is given them
            try:
                made: Any = serialise(item)
            except Exception as error:  # many cannot be pickled: then the error must not tell either
                made = shown_by(error)
            assert found_in(repr(made)) == [], (name, serialise)


def test_what_holds_the_examples_is_neither_pickled_nor_copied(release: Any) -> None:
    held = objects(release)
    for name in ("store", "the owners", "a view", "buckets", "selector", "ensemble", "release", "chain"):
        for serialise in (pickle.dumps, copy.deepcopy):
            with pytest.raises((UnsafeConfigurationError, TypeError, pickle.PicklingError, AttributeError)):
                serialise(held[name])


def test_what_is_looked_for_is_there(store: Any) -> None:
    """The control: plain containers of the same would show it."""
    assert found_in(written(secret_records())) == [EXEMPLAR, OWNER]
    assert found_in(repr(exemplars_of(store))) == [EXEMPLAR]
    assert found_in(repr(list(store.owners))) == [OWNER]


def test_graphs_and_schemas_show_no_secret(release: Any) -> None:
    for runnable in (release, RunnablePassthrough() | release, release.ensemble, release.with_receipt()):
        graph = runnable.get_graph()
        shown = [
            repr(graph),
            graph.draw_mermaid(),
            json.dumps(graph.to_json(with_schemas=True), default=repr),
            repr([vars(node) if hasattr(node, "__dict__") else node for node in graph.nodes.values()]),
            json.dumps(runnable.get_input_jsonschema()),
            json.dumps(runnable.get_output_jsonschema()),
            json.dumps(runnable.config_schema().model_json_schema()),
            repr([runnable.get_prompts(), runnable.InputType, runnable.OutputType, runnable.config_specs]),
            runnable.get_name(),
        ]
        assert found_in("\n".join(shown)) == []
    assert all(node.data is None or "Clinic" not in repr(node.data) for node in release.get_graph().nodes.values())


def test_errors_of_the_store_show_no_secret_in_their_frames(store: Any) -> None:
    """Raised by the store's own reading methods; an error about bad records passes frames that were handed these."""
    for call in (
        lambda: store.forget("nobody"),
        lambda: store.save("/proc/no/such/file"),
        lambda: pickle.dumps(store),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        shown = shown_by(caught.value)
        assert found_in(shown) == []


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Their losses add up")  # one store serves all tests of this file
@pytest.mark.parametrize("keep_queries", [False, True])
async def test_the_ledgers_bytes_hold_no_secret(keep_queries: bool, store: Any, tmp_path: Path) -> None:
    """Its pages, its write-ahead log and its key file, after releases, failures and replays."""
    budget = PrivacyBudget(
        1000, 1e-5, 10, replay=True, keep_queries=keep_queries, ledger=f"sqlite:///{tmp_path / 'ledger.db'}"
    )
    sealed = sealed_release(store, a_member(Clinic()), Tally(LABELS, mechanism="vote"), budget, MEMBERS)
    failing = sealed_release(
        store, a_member(Clinic(fares="all fail")), Tally(LABELS, mechanism="vote"), budget, MEMBERS
    )
    asked = {"input": "a-public-question"}
    assert sealed.invoke(asked) == await sealed.ainvoke(asked) == "Positive"
    with pytest.raises(Exception, match="usable"):
        failing.invoke({"input": "another"})
    while_open = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file())
    budget.close()
    content = while_open + b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file())
    assert b"Positive" in content, "answers are there, so this reads the right files"
    assert (b"a-public-question" in content) == keep_queries
    assert found_in(content.decode("latin-1")) == []


@pytest.mark.filterwarnings("ignore:.*Their losses add up")  # one store serves all tests of this file
def test_a_release_writes_no_cache(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_of: Callable[..., PrivacyBudget]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    budget = budget_of(epsilon=999.0)
    assert (
        sealed_release(store, a_member(Clinic()), Tally(LABELS, mechanism="vote"), budget, MEMBERS).invoke(QUESTION)
        == "Positive"
    )
    assert not (tmp_path / "cache").exists()


def test_room_for_later_vectors_holds_no_freed_memory(store: Any) -> None:
    """A pickle of it, or a dump, would show what was there before."""
    store.load_vectors()
    arrays = store._memory.matrix._arrays
    for array in (arrays.ids, arrays.owners, arrays.vectors):
        assert len(array) > arrays.count
        assert not array[arrays.count :].any()

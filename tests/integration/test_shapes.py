"""Each shape of docs/shapes.md, run as it stands there and as it was: changed, each call reads one owner's notes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ears import Ears
from langchain_classic.retrievers import TimeWeightedVectorStoreRetriever
from langchain_community.retrievers import TFIDFRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter
from pydantic import Field

from langchain_dpicl import (
    ExemplarStore,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
    split_with_parents,
)

PAGE = (Path(__file__).parents[2] / "docs" / "shapes.md").read_text(encoding="utf-8")
SETUP, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHAPES = dict(re.findall(r"^## (.+?)\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
ROWS = dict(re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (\d+) \|", PAGE, re.MULTILINE))
CHANGED = re.compile(r"^(\s*)\S.*  # was: (.*)$", re.MULTILINE)

PATIENTS, NOTES = 40, 3
"""Half of the 40 patients have a call on average: fewer than four with a probability below 1e-8. At epsilon 300 the
noise turns four votes for one label with a probability below 1e-9."""

EMBEDDINGS = DeterministicFakeEmbedding(size=8)


class Scripted(BaseChatModel):
    """Searches by its tool, if it has one and has not yet; then names the desk of the notes. Keeps what it was told."""

    told: Any = Field(default_factory=Ears, exclude=True)
    tools: Any = ()

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        if self.tools and not isinstance(messages[-1], ToolMessage):
            answer = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "renewals"}, "id": "1"}])
        else:
            text = "\n".join(str(message.content) for message in messages)
            self.told.append(text)
            answer = AIMessage("porch" if "porch" in text else "ledger")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def notes() -> list[Document]:
    return [
        Document(f"note {i}.{j} of the porch", metadata={"patient": f"p{i}", "note": f"note {i}.{j}", "desk": "porch"})
        for i in range(PATIENTS)
        for j in range(NOTES)
    ]


def join(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page's blocks name: the private one's set-up, and what stood in its place."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"documents": notes(), "embeddings": EMBEDDINGS, "join": join}
    given["model"] = Scripted()
    exec(SETUP.replace("epsilon=3,", "epsilon=300,"), given)
    splitter = CharacterTextSplitter(separator=" of ", chunk_size=12, chunk_overlap=0)
    collection = InMemoryVectorStore.from_documents(notes(), EMBEDDINGS)
    parts = split_with_parents(notes(), splitter)
    chunks = ExemplarStore.from_documents(parts, EMBEDDINGS, owner_key="patient")
    docstore: InMemoryStore = InMemoryStore()
    docstore.mset([(part.metadata["doc_id"], Document(part.metadata["parent_text"])) for part in parts])
    selecting = {"calls": 20, "exemplars_per_owner": 9, "max_exemplars": 9}
    given |= {
        "collection": collection,
        "splitter": splitter,
        "chunks": chunks,
        "collection_of_chunks": InMemoryVectorStore.from_documents(parts, EMBEDDINGS),
        "docstore": docstore,
        "by_chunks": PoissonExampleSelector(chunks, nearest_to="question", **selecting),
        "inputs": PoissonExampleSelector(given["store"], nearest_to="input", **selecting),
        "notes_tool": create_retriever_tool(collection.as_retriever(), "search", "Searches the notes."),
    }
    app = RunnableLambda(lambda request: request["question"]) | given["store"].as_vectorstore().as_retriever()
    asked = PoissonExampleSelector(given["store"], nearest_to="query", **selecting)
    member = RunnableLambda(lambda request: {"question": request["query"]}) | app | join | given["model"]
    given["release"] = PrivateEnsemble(asked, member | (lambda message: message.text)) | given["vote"]
    yield given
    given["budget"].close()


def owners_in(told: str) -> set[str]:
    return set(re.findall(r"note (\d+)\.", told))


def ran(code: str, names: dict[str, Any]) -> Any:
    """What the block's last expression gives."""
    before, last = code.rstrip().rsplit("\nanswer.invoke(", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(before, "shapes.md", "exec", dont_inherit=True), names)
        return eval(f"answer.invoke({last}", names)


def as_it_was(code: str) -> str:
    return CHANGED.sub(r"\1\2", code)


def test_the_table_names_every_shape_and_its_changed_lines() -> None:
    assert {name: len(CHANGED.findall(code)) for name, code in SHAPES.items()} == {
        name: int(lines) for name, lines in ROWS.items()
    }
    assert all(1 <= int(lines) <= 3 for lines in ROWS.values())
    assert len(SHAPES) == 16


@pytest.mark.parametrize("name", SHAPES)
def test_as_it_was_the_app_shows_many_owners_notes_to_its_model(name: str, names: dict[str, Any]) -> None:
    assert ran(as_it_was(SHAPES[name]), names) == "porch"
    assert names["budget"].spent() == 0
    assert len(set().union(*map(owners_in, names["model"].told))) > 1


@pytest.mark.parametrize("name", SHAPES)
def test_changed_each_call_reads_one_owners_notes_and_the_vote_is_released(name: str, names: dict[str, Any]) -> None:
    assert ran(SHAPES[name], names) == "porch"
    assert names["budget"].spent() == 1
    seen = [owners_in(told) for told in names["model"].told if owners_in(told)]
    assert all(len(owners) == 1 for owners in seen)
    assert len(set().union(*seen)) >= 4, "the calls of many owners"
    if name == "Message history outside":
        assert [message.text for message in names["history"].messages] == ["Which desk renews it?", "porch"]
    if name == "Agent with a checkpointer":
        assert not owners_in(repr(list(names["saver"].list(None))))


OVER_THE_COLLECTION = ["LCEL", "Agent with a retrieval tool", "Dynamic prompt", "Graph that retrieves and generates"]


@pytest.mark.parametrize("name", OVER_THE_COLLECTION)
def test_the_collection_itself_in_a_member_is_refused_and_costs_nothing(name: str, names: dict[str, Any]) -> None:
    code = SHAPES[name].replace("vectors = store.as_vectorstore()", "vectors = collection")
    with pytest.raises(UnsafeConfigurationError, match=r"build the app over store.as_vectorstore\(\)"):
        ran(code, names)
    assert names["budget"].spent() == 0


def test_a_search_outside_of_a_release_is_refused(names: dict[str, Any]) -> None:
    code = re.sub(r"PrivateEnsemble\(selector, (.*?)\) \| vote", r"\1", SHAPES["Agent with a retrieval tool"])
    with pytest.raises(UnsafeConfigurationError, match="a member's documents exist within a release alone"):
        ran(code, names)


def test_rankings_over_all_documents_and_memories_are_refused(names: dict[str, Any]) -> None:
    vectors = names["store"].as_vectorstore()
    for inside, said in (
        (TFIDFRetriever.from_documents(notes()), "the words of all documents"),
        (TimeWeightedVectorStoreRetriever(vectorstore=vectors), "keeps a memory"),
    ):
        code = SHAPES["Compression"].replace("base_retriever=vectors.as_retriever()", "base_retriever=inside")
        with pytest.raises(UnsafeConfigurationError, match=said):
            ran(code, {**names, "inside": inside})
    assert names["budget"].spent() == 0

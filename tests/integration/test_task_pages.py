"""The code of docs/tasks/rag.md and agent.md, run from top to bottom as it stands, with an app of a test's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import StructuredTool
from langchain_core.vectorstores import InMemoryVectorStore
from pages import blocks

from langchain_dpicl import InvalidParameter, PrivacyBudget, wrap_rag

pytestmark = pytest.mark.filterwarnings("ignore:the budget .* is used with data on which other budgets")
"""A page's blocks are alternatives; here they run one after the other."""

WORDS = ("drops", "after dinner", "before sunrise", "porch", "ledger", "renews")


class Bag(Embeddings):
    """A direction for each word."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = np.array([float(word in text) for word in WORDS])
        return [float(number) for number in vector / max(1.0, float(np.linalg.norm(vector)))]


class Scripted(BaseChatModel):
    """Calls each tool that it has once, with what its schema wants; then names the desk of what it has read."""

    tools: Any = ()

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        text = "\n".join(str(message.content) for message in messages)
        desk = "porch" if "porch" in text else "ledger"
        asked = sum(isinstance(message, ToolMessage) for message in messages)
        if asked < len(self.tools):
            tool = self.tools[asked]
            args = {"desk": desk, "urgent": True} if "urgent" in str(tool) + str(tool.args) else {"query": "renews"}
            return said(AIMessage("", tool_calls=[{"name": tool.name, "args": args, "id": str(asked)}]))
        return said(AIMessage(desk))


def said(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def advise(prompt: Any) -> AIMessage:
    return AIMessage("Take it after dinner." if "after dinner" in prompt.to_string() else "I do not know.")


def join(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def rag_of(retriever: Any) -> Any:
    context = {"context": retriever | join, "question": RunnablePassthrough()}
    return context | PromptTemplate.from_template("{context}\n{question}") | RunnableLambda(advise) | StrOutputParser()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A clinic's app: 480 patients on eight wards, half of whom write about drops, and the other half of a desk."""
    monkeypatch.chdir(tmp_path)
    documents = [
        Document(
            f"note {i}: the drops after dinner" if i % 2 else f"note {i}: the porch renews it",
            metadata={"patient": f"p{i}", "ward": str(1 + i // 60), "team": "a", "year": 2020 + i % 5},
        )
        for i in range(480)
    ]
    return {
        "documents": documents,
        "embeddings": Bag(),
        "vectorstore": InMemoryVectorStore.from_documents(documents, Bag()),
        "prompt": PromptTemplate.from_template("{context}\n{question}"),
        "llm": RunnableLambda(advise),
        "join": join,
        "rag_of": rag_of,
        "sentences": ["Take it after dinner.", "Take it before sunrise."],
        "words": ["drops", "dinner", "sunrise", "porch"],
        "public_notes": [f"{i}: drops after dinner" if i % 5 == 0 else f"{i}: a note" for i in range(50)],
        "model": Scripted(),
    }


def run(code: str, names: dict[str, Any]) -> Any:
    """Run a block, and return what its last expression gives."""
    lines = code.rstrip().splitlines()
    start = next(i for i in range(len(lines) - 1, -1, -1) if not lines[i].startswith((" ", ")")))
    last = "\n".join(lines[start:])
    if lines[start].startswith("with "):
        lines[start + 1] = f"    answer = {lines[start + 1].strip()}"
    elif re.match(r"[\w.]+\(", last):
        lines[start] = f"answer = {lines[start]}"
    names.pop("answer", None)
    exec(compile("\n".join(lines), "page", "exec", dont_inherit=True), names)
    return names.get("answer")


@pytest.mark.asks_first
def test_the_page_on_rag_runs_and_answers_right(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Of the owners on drops each has a call with the plan's rate q, and all agree: a false alarm has a probability
    below (1 - q + q e^-r)^owners, at most 1e-6. 240 owners clear the bar of a table's margin by 40 sigma."""
    faq, first, chain, filtered, by_request, table = blocks("tasks/rag.md", "python", "")
    run(first, names)
    run(chain, names)
    assert "rehearsal passed" in capsys.readouterr().out
    assert [names["budget"].spent(line=line) for line in ("answers", "words")] == [1, 1]
    assert names["private"].invoke("When do I take the drops?") == "Take it after dinner."
    assert run(faq, names).text == "Take it after dinner."
    assert names["once"].spent() == 2
    assert run(filtered, names) == "Take it after dinner."
    assert run(by_request, names) is None
    selector = names["selector"]
    request = {"input": "the drops?", "team": "a", "since": 2022}
    assert len(selector.eligible(selector.embed_query(request, "ann"))) == 36
    assert run(table, names) == "after dinner"
    assert names["for_ever"].invoke("When do I take the drops?") == "Take it after dinner."


@pytest.mark.asks_first
def test_the_page_on_agents_runs_and_answers_right(names: dict[str, Any]) -> None:
    as_tool, by_tool, by_question, as_member, of_fields = blocks("tasks/agent.md", "python", "")
    names["classify"] = wrap_rag(
        rag_of(names["vectorstore"].as_retriever()),
        names["vectorstore"],
        names["sentences"],
        PrivacyBudget(epsilon=3, delta=1e-5, releases=20, name="tool"),
        owner_key="patient",
        threshold=None,
    )
    assert run(as_tool, names)["messages"][-1].text in ("porch", "ledger")
    names |= {"release": names["classify"], "search": StructuredTool.from_function(never, name="search")}
    run(by_tool, names)
    state = names["agent"].invoke({"messages": [("human", "Do reviewers like it?")]})
    assert state["messages"][-2].artifact["budget"] == "tool"
    run(by_question, names)
    assert names["state"]["released"][0].metadata["receipt"]["budget"] == "tool"
    assert run(as_member, names) == "porch"
    assert names["private"].invoke("Which desk renews it?") == "porch"
    assert names["budget"].spent() == 1, "the plain text is the same request"
    assert run(of_fields, names) == names["Fix"](desk="porch", urgent=True)


def never(query: str) -> str:
    """Search the private notes."""
    raise AssertionError("the private tool ran")


def test_without_eligible_the_pages_filter_is_refused_in_words_that_help(names: dict[str, Any]) -> None:
    _, first, _, filtered, *_ = blocks("tasks/rag.md", "python", "")
    run(first, names)
    names["PrivacyBudget"] = PrivacyBudget
    without = "\n".join(line for line in filtered.splitlines() if "eligible" not in line)
    with pytest.raises(InvalidParameter, match="the number of owners whom one caller's filter"):
        run(without, names)

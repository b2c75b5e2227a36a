"""docs/integrations: each page's code from top to bottom, with an app of `test_task_pages` and a model that reads."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pages import DOCS, blocks
from test_task_pages import join, said
from test_task_pages import names as names

PAGES = sorted(path.name for path in (DOCS / "integrations").glob("*.md"))
QUESTION = "When do I take the drops?"
ANSWER = "Take it after dinner."
"""Of 240 owners on drops some 50 have a call, and all agree: a false alarm is as rare as in `test_task_pages`."""


class Reading(BaseChatModel):
    """Asks its only tool the question, and says the last line that it has read: of a tool, or of its system prompt."""

    tools: Any = ()

    @property
    def _llm_type(self) -> str:
        return "reading"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        question = next(message.text for message in messages if isinstance(message, HumanMessage))
        if self.tools and not isinstance(messages[-1], ToolMessage):
            [tool] = self.tools
            return said(AIMessage("", tool_calls=[{"name": tool.name, "args": {"query": question}, "id": "1"}]))
        read = messages[-1] if self.tools else messages[0]
        return said(AIMessage(read.text.splitlines()[-1]))


def advise(prompt: Any) -> AIMessage:
    return AIMessage(ANSWER if "after dinner" in prompt.to_string() else "Take it before sunrise.")


@pytest.fixture
def app(names: dict[str, Any]) -> dict[str, Any]:
    """What the pages call yours."""
    llm = RunnableLambda(advise)
    context = {"context": names["vectorstore"].as_retriever() | join, "question": RunnablePassthrough()}
    return {**names, "rag": context | names["prompt"] | llm | StrOutputParser(), "llm": llm, "model": Reading()}


def answer_of(shown: Any) -> Any:
    """What a block's last expression says: itself, a pair's first, or an agent's last message."""
    if isinstance(shown, tuple):
        return shown[0]
    return shown["messages"][-1].text if isinstance(shown, dict) else shown


@pytest.mark.asks_first
@pytest.mark.parametrize("page", PAGES)
def test_a_pages_code_runs_and_answers_right_for_one_charge(page: str, app: dict[str, Any]) -> None:
    answers = []
    for block in blocks(f"integrations/{page}", "python", ""):
        *steps, last = ast.parse(block).body
        exec(compile(ast.Module(steps, []), page, "exec"), app)
        if isinstance(last, ast.Expr):
            answers.append(answer_of(eval(compile(ast.Expression(last.value), page, "eval"), app)))
        else:
            exec(compile(ast.Module([last], []), page, "exec"), app)
    assert answers
    assert set(answers) == {ANSWER}
    assert app["budget"].spent() == 1, "one question, however it is asked"


def test_the_provider_page_names_every_component_page() -> None:
    page = (DOCS / "integrations" / "dpicl.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+\.md)\)", page)) == [name for name in PAGES if name != "dpicl.md"]


@pytest.mark.parametrize("page", [name for name in PAGES if name != "dpicl.md"])
def test_a_component_page_has_the_sections_of_langchains_template(page: str) -> None:
    text = (DOCS / "integrations" / page).read_text(encoding="utf-8")
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    assert headings[:2] == ["Overview", "Details"]
    wanted = ["Setup", "Instantiation", "API reference"]
    assert [heading for heading in headings if heading in wanted] == wanted
    assert {"Use with an agent", "Within an agent"} & set(headings)

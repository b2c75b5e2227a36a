"""An agent that searches private messages with a tool, made private: each copy of it searches one patient's messages.

The embedded models are too small to call tools, so the agent's model follows a script for its search; its answer is the
embedded model's. Give it one that calls tools: DPICL_AGENT_MODEL=openai:gpt-4.1-mini python examples/agent_rag.py
"""

import os
from typing import Any

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox(customers=200)
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
vectors = store.as_vectorstore()


@tool
def search_messages(query: str) -> str:
    """Searches the clinic's messages, with the desk that took each."""
    found = vectors.similarity_search(query, k=2)
    return "\n\n".join(f"Message: {each.page_content}\nDesk: {each.metadata['label']}" for each in found)


writer = local_llm(max_tokens=4).bind(stop=["\n"])


class Searcher(BaseChatModel):
    """Searches for the message that it is asked about, then lets the embedded model answer."""

    @property
    def _llm_type(self) -> str:
        return "searcher"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        asked, last = messages[0].text, messages[-1]
        if isinstance(last, ToolMessage):
            said = AIMessage(writer.invoke(f"{last.text}\n\nMessage: {asked}\nDesk:"))
        else:
            call = {"name": "search_messages", "args": {"query": asked}, "id": "1"}
            said = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=said)])


name = os.environ.get("DPICL_AGENT_MODEL")
agent: Any = create_agent(init_chat_model(name) if name else Searcher(), [search_messages])


def as_messages(request: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [("human", request["input"])]}


app = RunnableLambda(as_messages) | agent | (lambda state: state["messages"][-1].text)
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2, max_exemplars=2, exemplars_per_owner=2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=20, ledger="sqlite:///agent_rag.db", name="agent")
ensemble = PrivateEnsemble(selector, app)

# At no cost, on public messages: what the agent is asked, what it finds and says.
public = [{"input": "I lost my glasses, is there a repair service?", "text": "I lost my glasses.", "label": "Porch"}]
print(ensemble.rehearse(public, {"input": questions[0]["text"]}))

desk = ensemble | DPAggregate(NoisyVote(DEMO_LABELS), budget)
print(desk.invoke({"input": questions[0]["text"]}), "is right:", questions[0]["label"])
print(budget)

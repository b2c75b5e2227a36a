"""An agent whose tool answers from private messages, and what it does when the tool's budget is spent.

The embedded models are too small to call tools, so the agent follows a script here. Give it a model that does:
DPICL_AGENT_MODEL=openai:gpt-4.1-mini python examples/agent.py
"""

import os
from typing import Any

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelScorer,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.demo.inbox import DEMO_CONTENT_FREE, DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox()
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=1, ledger="sqlite:///agent.db", name="agent")
member = LabelScorer(local_llm(), DEMO_LABELS, instruction="", content_free=DEMO_CONTENT_FREE)
route = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(DEMO_LABELS), budget)
tool = route.as_tool("route_message", "The desk of the clinic that a patient's message belongs to.")


class Script(FakeMessagesListChatModel):
    """Calls the tool for each of two messages, then ends."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


script: list[BaseMessage] = [
    AIMessage("", tool_calls=[{"name": tool.name, "args": {"query": question["text"]}, "id": f"call-{i}"}])
    for i, question in enumerate(questions[:2])
]
script.append(AIMessage("One message is routed. For the other the privacy budget was spent."))
name = os.environ.get("DPICL_AGENT_MODEL")
agent = create_agent(init_chat_model(name) if name else Script(responses=script), [tool])
asked = HumanMessage("Route these messages: " + " / ".join(question["text"] for question in questions[:2]))
for message in agent.invoke({"messages": [asked]})["messages"]:
    print(f"{message.type:6s} {message.text or message.tool_calls[0]['args']}")

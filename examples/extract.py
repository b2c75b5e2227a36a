"""Fill in a typed ticket for a patient's message, as the clinic did for other patients: a pydantic model, private."""

import json
import random
from typing import Any, Literal

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    Structured,
)
from langchain_dpicl.demo.inbox import demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm


class Ticket(BaseModel):
    """What the clinic notes down."""

    desk: Literal["Flask", "Ledger", "Porch"]
    visit: bool
    days: int = Field(ge=0, le=30)


DAYS = {"Flask": (1, 3), "Ledger": (9, 14), "Porch": (4, 7)}
chance = random.Random(7)  # it makes the invented data


def ticket_of(desk: str) -> str:
    """A ticket as JSON: how long this desk took, and whether the patient had to come."""
    return json.dumps({"desk": desk, "visit": desk == "Porch", "days": chance.randint(*DAYS[desk])})


def prompt(values: dict[str, Any]) -> str:
    """The examples of one call, which belong to one patient, then the question."""
    shown = [f"Message: {each['text']}\nTicket: {each['ticket']}\n\n" for each in values["examples"]]
    return "".join(shown) + f"Message: {values['input']}\nTicket:"


records, questions = demo_inbox()
filled = [{**record, "ticket": ticket_of(record["label"])} for record in records]
store = ExemplarStore.from_records(
    filled, local_embeddings(), input_key="text", output_key="ticket", owner_key="customer"
)
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2)
member = RunnableLambda(prompt) | local_llm(max_tokens=40).bind(stop=["\n"]) | StrOutputParser()

# Three fields, one sample, one charge. A median among 31 numbers needs more of epsilon than a vote among three desks.
fields = Structured(Ticket, weights={"days": 2})
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=5, ledger="sqlite:///tickets.db", name="tickets")
ticket = PrivateEnsemble(selector, member) | DPAggregate(fields, budget, return_receipt=True)
answered = ticket.invoke({"input": "Hello, could you renew my metformin prescription before Friday? Vera Stern"})
print(repr(answered["answer"]))
print(answered["receipt"]["id"], budget)

"""Route a patient's message to the right desk, learning the desks from private messages."""

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

records, questions = demo_inbox()  # your own: a list of mappings, e.g. {"text": ..., "label": ..., "customer": ...}
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
# About 20 calls of the model, each with one customer's message that is similar to the question.
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=100, ledger="sqlite:///inbox.db", name="inbox")
member = LabelScorer(local_llm(), DEMO_LABELS, instruction="", content_free=DEMO_CONTENT_FREE)
route = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(DEMO_LABELS), budget)
print(route.invoke({"input": "Hello, could you renew my metformin prescription before Friday? Vera Stern"}))
print(budget)

"""Route patients' messages with receipts, until the budget says no."""

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelScorer,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
)
from langchain_dpicl.demo.inbox import DEMO_CONTENT_FREE, DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox()  # your own: a list of mappings, e.g. {"text": ..., "label": ..., "customer": ...}
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=2, ledger="sqlite:///classify.db", name="classify")
member = LabelScorer(local_llm(), DEMO_LABELS, instruction="", content_free=DEMO_CONTENT_FREE)
route = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(DEMO_LABELS), budget, return_receipt=True)

# Two answers are charged together, before any model call; then the budget is spent.
texts = [question["text"] for question in questions[:3]]
for text, released in zip(texts, route.batch([{"input": text} for text in texts[:2]]), strict=False):
    receipt = released["receipt"]
    print(f"{released['answer']:8s} {text}")
    print(f"         {receipt['id']}: epsilon {receipt['epsilon_spent']:.2f} of 3, {receipt['remaining']} left")

again = route.invoke({"input": texts[0]})  # the same question is answered from the ledger, at no cost
print(f"{again['answer']:8s} (replayed: {again['receipt']['replayed']})")

try:
    route.invoke({"input": texts[2]})
except PrivacyBudgetExceeded as error:
    print(error)

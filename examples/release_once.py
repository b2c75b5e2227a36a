"""Release a classifier once and ask it for ever: an answer needs no charge, no noise and no language model."""

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateHead, label_public
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings

records, questions = demo_inbox()  # your own: a list of mappings, e.g. {"text": ..., "label": ..., "customer": ...}
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
budget = PrivacyBudget(epsilon=1, delta=1e-5, releases={"head": 1}, ledger="sqlite:///heads.db", name="inbox-head")
head = PrivateHead.fit(store, DEMO_LABELS, budget)
head.save("head.npz")  # public: PrivateHead.load("head.npz", local_embeddings()) answers anywhere
print(head.invoke("Hello, could you renew my metformin prescription before Friday? Vera Stern"))

answers = head.batch([row["text"] for row in questions])
right = sum(answer["label"] == row["label"] for answer, row in zip(answers, questions, strict=True))
print(f"{right} of {len(questions)} questions right; spent: {budget.spent()} of 1 release, once")

public = ["Where do I send the invoice?", "My tablets are nearly empty.", "Can I come on Tuesday instead?"]
for pair in label_public(head, public):  # demonstrations for any prompt and any hosted model
    print(pair)

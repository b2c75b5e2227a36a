"""Answer a patient with one of the clinic's public sentences, learning from private replies which one fits."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from replies import PUBLIC_REPLIES, reply_prompt, with_replies

from langchain_dpicl import (
    DPAggregate,
    EmbeddingMean,
    ExemplarStore,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.demo.inbox import demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox()
store = ExemplarStore.from_records(
    with_replies(records), local_embeddings(), input_key="text", output_key="reply", owner_key="customer"
)
selector = PoissonExampleSelector(store, members=20, shots=2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=10, ledger="sqlite:///replies.db", name="embedding")
member = RunnableLambda(reply_prompt) | local_llm(max_tokens=24).bind(stop=["\n"]) | StrOutputParser()
mean = EmbeddingMean(local_embeddings(), PUBLIC_REPLIES)
reply = PrivateEnsemble(selector, member) | DPAggregate(mean, budget, return_receipt=True)

answered = reply.invoke({"input": "My last box of salbutamol tablets is nearly empty. Please renew the prescription."})
print(answered["answer"])
print(f"{answered['receipt']['id']}: epsilon {answered['receipt']['epsilon_spent']:.2f} spent, {budget!r}")

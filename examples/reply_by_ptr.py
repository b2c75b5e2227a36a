"""Answer a patient with keywords of no fixed list: a set of words, released only where a private test passes."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from replies import PUBLIC_PROMPT, reply_prompt, with_replies

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    Keywords,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    keywords_to_answer,
)
from langchain_dpicl.demo.inbox import demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox()
store = ExemplarStore.from_records(
    with_replies(records), local_embeddings(), input_key="text", output_key="reply", owner_key="customer"
)
selector = PoissonExampleSelector(store, members=30, shots=2)  # the test wants many members
budget = PrivacyBudget(epsilon=8, delta=1e-5, releases=10, ledger="sqlite:///replies.db", name="ptr")
member = RunnableLambda(reply_prompt) | local_llm(max_tokens=24).bind(stop=["\n"]) | StrOutputParser()
test = DPAggregate(Keywords.ptr(k=(2, 4)), budget, return_receipt=True)
answer = keywords_to_answer(local_llm("smollm2-135m-instruct", max_tokens=24).bind(stop=["\n"]), PUBLIC_PROMPT)
keywords = PrivateEnsemble(selector, member) | test

released = keywords.invoke({"input": "The invoice says $120. My insurance paid the bill."})
print(released["answer"], released["receipt"]["outcome"])  # where the test fails: no words, "zero-shot fallback"
print(answer.invoke(released)["answer"].strip())
print(budget)

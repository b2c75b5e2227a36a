"""Answer a patient in the clinic's own words: ranked keywords of a public list, learnt from private replies."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from replies import PUBLIC_PROMPT, PUBLIC_WORDS, reply_prompt, with_replies

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
selector = PoissonExampleSelector(store, members=20, shots=2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=10, ledger="sqlite:///replies.db", name="joint-em")
member = RunnableLambda(reply_prompt) | local_llm(max_tokens=24).bind(stop=["\n"]) | StrOutputParser()
keywords = PrivateEnsemble(selector, member) | DPAggregate(Keywords.joint_em(PUBLIC_WORDS, k=4), budget)
reply = keywords | keywords_to_answer(
    local_llm("smollm2-135m-instruct", max_tokens=24).bind(stop=["\n"]), PUBLIC_PROMPT
)

question = {"input": "The invoice says $120. My insurance paid the bill."}
print(keywords.invoke(question))
print(reply.invoke(question).strip())
print(budget)

"""Write a clinic's replies token by token from its private ones; then make public demonstrations of them, once."""

import numpy as np
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from replies import with_replies

from langchain_dpicl import (
    DemonstrationTemplate,
    DPSampler,
    ExemplarStore,
    PoissonExampleSelector,
    PrivacyBudget,
    TransformersLogits,
    synthesize_demonstrations,
)
from langchain_dpicl.demo.inbox import demo_inbox
from langchain_dpicl.local import local_embeddings

records, questions = demo_inbox()
store = ExemplarStore.from_records(
    with_replies(records),
    local_embeddings(),
    input_key="text",
    output_key="reply",
    owner_key="customer",
    vectors=np.zeros((len(records), 1), np.float32),  # nothing is looked for by similarity
)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=100, ledger="sqlite:///write.db", name="write")  # tokens
write = DPSampler(
    TransformersLogits(),
    PoissonExampleSelector(store, members=4, shots=1),  # four patients a token, one message each
    budget,
    template=DemonstrationTemplate.of(store, input_name="Patient", output_name="Clinic"),
    max_tokens=12,
    stop="\n",
    pad=False,  # nobody else times the calls here
)
for piece in write.stream("Hello, could you renew my metformin prescription before Friday? Vera Stern"):
    print(piece, end="", flush=True)
print(f"\n{budget}")

asked = ["I was charged twice for one visit.", "Can I come on Monday instead of Tuesday?"]
demonstrations = synthesize_demonstrations(write, asked, output="demonstrations.jsonl")
prompt = FewShotPromptTemplate(
    examples=demonstrations,
    example_prompt=PromptTemplate.from_template("Patient: {text}\nClinic: {reply}"),
    suffix="Patient: {text}\nClinic:",
    input_variables=["text"],
)
print(prompt.invoke({"text": "My tablets are nearly empty."}).to_string())
print(f"epsilon {budget.epsilon_spent():.2f} of {budget.epsilon:g}: the prompt may be shown to any model, for ever")

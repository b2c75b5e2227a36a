"""A LangGraph app that retrieves and generates, and the same app made private: it searches another store."""

from operator import itemgetter
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langgraph.graph import START, StateGraph

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
documents = [
    Document(f"Message: {record['text']}\nDesk: {record['label']}", metadata={"patient": record["customer"]})
    for record in records
]
llm = local_llm(max_tokens=4).bind(stop=["\n"])


class State(TypedDict, total=False):
    question: str
    context: list[Document]
    answer: str


def app_over(vectors: VectorStore) -> Any:
    """The app, as LangGraph's documentation writes it."""

    def retrieve(state: State) -> State:
        return {"context": vectors.similarity_search(state["question"], k=2)}

    def generate(state: State) -> State:
        shown = "\n\n".join(document.page_content for document in state["context"])
        return {"answer": llm.invoke(f"{shown}\n\nMessage: {state['question']}\nDesk:")}

    return StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve").compile()


asked: dict[str, Any] = {
    "question": "My last box of salbutamol tablets is nearly empty. Please renew the prescription."
}

# As it was: the messages of two patients are in the prompt, and whoever asks can read them there.
app = app_over(InMemoryVectorStore.from_documents(documents, local_embeddings()))
print("not private:", app.invoke(asked)["answer"].strip())

# Private: each call of the app searches the messages of one patient, and the calls vote.
store = ExemplarStore.from_documents(documents, local_embeddings(), owner_key="patient")
app = app_over(store.as_vectorstore())
selector = PoissonExampleSelector(
    store, calls=20, threshold=0.5, eligible=0.2, max_exemplars=2, exemplars_per_owner=2, nearest_to="question"
)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=20, ledger="sqlite:///graph.db", name="graph")
desk = PrivateEnsemble(selector, app | itemgetter("answer")) | DPAggregate(NoisyVote(DEMO_LABELS), budget)
# A first release asks in public whether answers can be read. This small model needs documents of their form for that.
public = ["Message: Please renew my prescription.\nDesk: Flask", "Message: I need more tablets.\nDesk: Flask"]
print("rehearsal passed:", desk.rehearse(public, asked).passed)
print("private:", desk.invoke(asked))
print(budget)

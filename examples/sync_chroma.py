"""A store that follows a Chroma collection: what is new, changed or gone there is so in the next answer.

Needs langchain-chroma. The votes are the messages' own desks, so no model is called.
"""

from langchain_chroma import Chroma
from langchain_core.documents import Document

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings

records, questions = demo_inbox(customers=200)
documents = [
    Document(record["text"], metadata={"patient": record["customer"], "desk": record["label"]}) for record in records
]
chroma = Chroma("inbox", embedding_function=local_embeddings(), collection_metadata={"hnsw:space": "cosine"})
ids = chroma.add_documents(documents)

store = ExemplarStore.from_vectorstore(chroma, owner_key="patient", output_key="desk")
selector = PoissonExampleSelector(store, calls=40, threshold=0.5, eligible=0.2)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=20, ledger="sqlite:///chroma.db", name="chroma")
desk = PrivateEnsemble(selector) | DPAggregate(LabelVote(DEMO_LABELS), budget)
print(f"{len(store)} messages of {store.owner_count} patients:", desk.invoke({"input": questions[0]["text"]}))

# A patient leaves, a message is corrected, a message comes.
gone = [
    id
    for id, document in zip(ids, documents, strict=True)
    if document.metadata["patient"] == documents[0].metadata["patient"]
]
chroma.delete(gone)
chroma.update_document(ids[-1], Document("Please renew my prescription.", metadata=documents[-1].metadata))
chroma.add_documents([Document("Is the clinic open on Friday?", metadata={"patient": "new", "desk": "Porch"})])
print(store.sync_from(chroma))
print(f"{len(store)} messages of {store.owner_count} patients:", desk.invoke({"input": questions[1]["text"]}))
print(budget)

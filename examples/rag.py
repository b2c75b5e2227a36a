"""An ordinary retrieval chain over private messages, and the same chain made private by one other line, in two ways."""

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import DPRetriever, NoisyVote, PrivacyBudget, wrap_rag
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm

records, questions = demo_inbox(customers=200)
documents = [
    Document(
        page_content=f"Message: {record['text']}\nDesk: {record['label']}", metadata={"patient": record["customer"]}
    )
    for record in records
]
collection = InMemoryVectorStore.from_documents(documents, local_embeddings())

prompt = PromptTemplate.from_template("{context}\n\nMessage: {question}\nDesk:")
llm = local_llm(max_tokens=4).bind(stop=["\n"])


def format_docs(found: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in found)


def rag(retriever: Runnable[str, list[Document]]) -> Runnable[str, str]:
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


question = "My last box of salbutamol tablets is nearly empty. Please renew the prescription."

# As it was: the documents of four patients are in the prompt, and whoever asks can read them there.
chain = rag(collection.as_retriever())
print("not private:", chain.invoke(question).strip())

# 1. The whole chain as the member: ten copies, each on its own patients' documents, and a noisy vote.
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=20, ledger="sqlite:///rag.db", name="rag")
desk = wrap_rag(
    chain, collection, NoisyVote(DEMO_LABELS), budget, owner_key="patient", documents=2, return_receipt=True
)
# A first release asks in public whether answers can be read. This small model needs documents of their form for that.
public = [
    Document("Message: Please renew my prescription.\nDesk: Flask"),
    Document("Message: I need more tablets.\nDesk: Flask"),
]
print("rehearsal passed:", desk.rehearse(public, question).passed)
answered = desk.invoke(question)
print("wrap_rag:", answered["answer"], answered["receipt"]["id"])

# 2. Another retriever in the chain as it was: its only document is a passage with the release of 1, already paid for.
passage = RunnablePassthrough.assign(answer=lambda released: f"Message: {question}\nDesk: {released['answer']}")
retriever = DPRetriever(release=desk | passage)
private_chain = rag(retriever)
(document,) = retriever.invoke(question)
print("DPRetriever:", private_chain.invoke(question).strip(), document.metadata["receipt"]["id"])
print(budget)

"""A chatbot over the support tickets of a clinic, as a newcomer has it before reading a page.

A page may use the attributes of `Chatbot` as names without defining them, and what its readers know to import.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

import langchain_dpicl
from langchain_dpicl.local import local_embeddings, local_llm

ADVICE = ("Take the drops after dinner.", "Take the drops before sunrise.")
WARDS = ("3", "4", "7", "8")
KNOWN = (Document, PromptTemplate, RunnableLambda, RunnablePassthrough, StrOutputParser)
IMPORTED = {name: getattr(langchain_dpicl, name) for name in langchain_dpicl.__all__}
IMPORTED |= {each.__name__: each for each in KNOWN}


class Chatbot:
    """The newcomer's own objects, made when a page first names them. ``names`` are those that exist by then."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        names |= IMPORTED

    @cached_property
    def documents(self) -> list[Document]:
        """A ticket of each of 600 patients, with every column that a page may take for a condition."""
        made = []
        for number in range(600):
            columns = {"patient": f"p{number:03d}", "ward": WARDS[number % 4], "team": "eyes", "year": 2026}
            made.append(Document(f"Ticket {number}: When do I take the drops?\n{ADVICE[0]}", metadata=columns))
        return made

    @cached_property
    def embeddings(self) -> Any:
        return local_embeddings()

    @cached_property
    def vectorstore(self) -> InMemoryVectorStore:
        return InMemoryVectorStore.from_documents(self.documents, self.embeddings)

    @cached_property
    def retriever(self) -> Any:
        return self.vectorstore.as_retriever()

    @cached_property
    def rag_of(self) -> Any:
        answer = self.prompt | self.llm | StrOutputParser()
        return lambda retriever: {"context": retriever | self.join, "question": RunnablePassthrough()} | answer

    @cached_property
    def join(self) -> Any:
        return lambda found: "\n\n".join(document.page_content for document in found)

    @cached_property
    def prompt(self) -> PromptTemplate:
        return PromptTemplate.from_template("{context}\n\nTicket: {question}\n")

    @cached_property
    def llm(self) -> Any:
        return local_llm(max_tokens=10).bind(stop=["\n"])

    @cached_property
    def sentences(self) -> Any:
        return langchain_dpicl.CandidateVote(self.embeddings, ADVICE)

    @cached_property
    def words(self) -> list[str]:
        return "dinner sunrise breakfast drops tablets noon midnight never always doctor".split()

    @cached_property
    def public_notes(self) -> list[str]:
        return [f"Ticket {number}: When do I take the {what}?" for number in range(50) for what in ("drops", "bill")]

    @cached_property
    def ensemble(self) -> Any:
        selector = langchain_dpicl.PoissonExampleSelector(self.names["store"], calls=20, threshold=0.35, eligible=0.5)
        return langchain_dpicl.PrivateEnsemble(selector, PromptTemplate.from_template("{examples}\n{input}") | self.llm)

    @cached_property
    def wards_of(self) -> dict[str, list[str]]:
        return {"ann": ["3", "4"], "bob": ["7", "8"]}

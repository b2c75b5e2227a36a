"""Demonstrations of public texts, which a head labels: for any prompt, retriever or hosted model, for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    BaseExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl.decoding.synthesis import DemonstrationReceipt, Demonstrations
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.privacy import checks
from langchain_dpicl.private.prompts import literal_examples
from langchain_dpicl.release.threshold import public_texts
from langchain_dpicl.store.records import as_matrix


class _NearestLast(BaseExampleSelector):
    """The examples of a selector, in reverse: models heed what comes last."""

    def __init__(self, selector: SemanticSimilarityExampleSelector) -> None:
        self._selector = selector

    def add_example(self, example: dict[str, str]) -> Any:
        """As the selector does."""
        return self._selector.add_example(example)

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """The nearest examples, the nearest last."""
        return self._selector.select_examples(input_variables)[::-1]

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """The same, asynchronously."""
        return (await self._selector.aselect_examples(input_variables))[::-1]


class _WithScores(Embeddings):
    """A text's embedding of norm 1, beside a head's probabilities: texts are near if they are alike and labelled alike.

    The head's probabilities weigh as much as the embedding. (By the embedding alone, near texts share a topic rather
    than a label: of TREC's training questions 53 % have the label of the nearest of 500 public ones, 72 % with them.)
    """

    def __init__(self, head: PrivateHead) -> None:
        self._head = head

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A row for each text."""
        rows = as_matrix(self._head.embeddings.embed_documents(texts), len(texts))
        lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        answers = self._head.answers(rows) if self._head.takes_vectors else self._head.batch(texts)
        scores = [list(answer["scores"].values()) for answer in answers]
        found: list[list[float]] = np.concatenate([rows / lengths, np.array(scores)], axis=1).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        """A question, embedded as a record, which it resembles."""
        return self.embed_documents([text])[0]


def label_public(
    head: PrivateHead,
    texts: Sequence[str],
    *,
    output_key: str = "output",
    least_confidence: float = 0.0,
) -> Demonstrations:
    """Label public texts by a head: demonstrations that anyone may use.

    A text and its label are a pair under the head's ``input_key`` and ``output_key``, with the receipt of the head. It
    costs nothing: labels are a function of what was released. The texts must be public; those whose label is less
    probable than ``least_confidence`` are in ``unanswered`` of the answer.
    """
    if not isinstance(head, PrivateHead):
        raise InvalidParameter("head", type(head).__name__, "a PrivateHead")
    shown = public_texts("texts", texts)
    least = checks.real("least_confidence", least_confidence, at_least=0.0, at_most=1.0)
    receipt = DemonstrationReceipt(
        **head.receipt,
        settings=hashlib.sha256(head.weights.tobytes()).hexdigest()[:32],
    )
    answers = list(zip(shown, head.batch(list(shown)), strict=True))
    pairs = [
        {head.input_key: text, output_key: answer["label"]} for text, answer in answers if answer["confidence"] >= least
    ]
    unanswered = [{head.input_key: text} for text, answer in answers if answer["confidence"] < least]
    return Demonstrations(pairs, [receipt] * len(pairs), unanswered)


def few_shot_chain(
    demonstrations: Demonstrations,
    llm: BaseLanguageModel[Any],
    embeddings: Embeddings | PrivateHead,
    *,
    k: int = 4,
    input_key: str = "input",
    output_key: str = "output",
    instruction: str = "",
) -> Runnable[Any, str]:
    """A chain that shows a model the ``k`` demonstrations that are nearest to a question, the nearest last.

    It takes ``{input_key: question}``, and gives the model's text. Everything in it is public. ``instruction`` opens
    the prompt, as it stands. ``embeddings`` says what is near; with the head itself, texts are near if they are alike
    and the head labels them alike, which is better wherever a text's topic says little about its label.
    """
    if not isinstance(demonstrations, Demonstrations) or not demonstrations:
        raise InvalidParameter("demonstrations", type(demonstrations).__name__, "Demonstrations, at least one")
    missing = [key for key in (input_key, output_key) if not all(key in pair for pair in demonstrations)]
    if missing:
        raise InvalidParameter(
            "demonstrations",
            missing[0],
            f"pairs with the keys {input_key!r} and {output_key!r}",
        )
    selector = SemanticSimilarityExampleSelector.from_examples(
        [{key: str(pair[key]) for key in (input_key, output_key)} for pair in demonstrations],
        _WithScores(embeddings) if isinstance(embeddings, PrivateHead) else embeddings,
        InMemoryVectorStore,
        k=checks.whole("k", k, at_most=len(demonstrations)),
        input_keys=[input_key],
    )
    asked = f"{input_key.capitalize()}: {{{input_key}}}\n{output_key.capitalize()}:"
    prompt = FewShotPromptTemplate(
        example_selector=_NearestLast(selector),
        example_prompt=PromptTemplate.from_template(f"{asked} {{{output_key}}}"),
        prefix=instruction.replace("{", "{{").replace("}", "}}"),
        suffix=asked,
        input_variables=[input_key],
    )
    return prompt.model_copy(update=literal_examples(prompt)) | llm | StrOutputParser()

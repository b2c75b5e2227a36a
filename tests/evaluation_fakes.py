"""Models, embeddings and tasks for tests of the evaluation: small, exact, and counted."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field

from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.private import Closed


def unit(*what: object) -> float:
    """A number in (0, 1) that depends on its arguments alone."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48


class FakeLLM(Closed, BaseLLM):
    """A completion model with log-probabilities: of each word a share that depends on the prompt.

    ``calls`` has every prompt. ``fails`` says for which prompts it raises; ``writes`` what it answers, else it answers
    with the likeliest word.
    """

    words: list[str] = Field(default_factory=list)
    calls: list[str] = Field(default_factory=list)
    fails: Callable[[str], bool] = lambda prompt: False
    writes: Callable[[str], str] | None = None
    weight: Callable[[str, str], float] = lambda prompt, word: unit(prompt, word)
    lock: Any = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"calls": [], "lock": threading.Lock(), **values})

    @property
    def _llm_type(self) -> str:
        return "fake"

    def model_copy(self, **_: Any) -> FakeLLM:
        """Itself, so that every call is counted."""
        return self

    def _generate(self, prompts: list[str], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        with self.lock:
            self.calls.extend(prompts)
        return LLMResult(generations=[[self._answer(prompt)] for prompt in prompts])

    def _answer(self, prompt: str) -> Generation:
        if self.fails(prompt):
            raise TimeoutError("the model timed out")
        if self.writes is not None:
            return Generation(text=self.writes(prompt))
        weights = {word: self.weight(prompt, word) for word in self.words}
        total = sum(weights.values())
        top = {f" {word}": math.log(weight / total) for word, weight in weights.items()}
        best = max(top, key=lambda word: top[word])
        logprobs = {"tokens": [best], "token_logprobs": [top[best]], "top_logprobs": [top], "text_offset": [0]}
        return Generation(text=best, generation_info={"logprobs": logprobs})


class WordEmbeddings(Embeddings):
    """Counts of words over a list, as a vector: cosines that a reader can compute."""

    def __init__(self, words: str) -> None:
        self.words = words.split()
        self.calls = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = np.array([text.split().count(word) for word in self.words], float)
        return (vector / max(1.0, float(np.linalg.norm(vector)))).tolist()


def rows(count: int, outputs: list[str], *, name: str = "row") -> list[Row]:
    """Rows with inputs of their own and outputs in turn."""
    made = []
    for i in range(count):
        output = outputs[i % len(outputs)]
        made.append(Row(f"{name} {i}", output, (output,)))
    return made

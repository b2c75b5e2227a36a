"""One pass of a model over a task with texts as answers: every member's text, before any aggregation.

A pass holds members' answers in the open: for data that are public in truth, or stay with their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import Key, PassFile, once_more
from langchain_dpicl.evaluation.plan import Pairs
from langchain_dpicl.evaluation.tasks import GenerationTask
from langchain_dpicl.members.downstream import keywords_to_answer
from langchain_dpicl.private import boundary

_WITH_WORDS = PromptTemplate.from_template("Complete the text{suggestions}.\n\n{asked}")


class Author:
    """Writes a task's answers with any LangChain model.

    Parameters
    ----------
    model
        Answers the members; it should be greedy.
    sampling
        The same model at a temperature above 0: writes public candidates.
    """

    def __init__(
        self,
        model: BaseLanguageModel[Any],
        sampling: BaseLanguageModel[Any],
        task: GenerationTask,
        *,
        at_once: int = 8,
    ) -> None:
        self._shape, self._stop, self._at_once = task.shape, list(task.stop), at_once
        self._member, self._candidate = (boundary.seal(self._chain(each)) for each in (model, sampling))
        self._from_words = boundary.seal(keywords_to_answer(model.bind(stop=self._stop), _WITH_WORDS) | str.strip)

    def _chain(self, model: BaseLanguageModel[Any]) -> Runnable[Any, str]:
        def prompt(values: dict[str, Any]) -> str:
            examples = [(each["input"], each["output"]) for each in values["examples"]]
            return self._shape.prefix(examples) + self._shape.ask(values["input"])

        return RunnableLambda(prompt) | model.bind(stop=self._stop) | StrOutputParser() | str.strip

    def write(self, prompts: Sequence[Pairs], query: str) -> list[str | None]:
        """Return an answer after each prompt's examples; None if the model failed twice."""
        buckets = [[{"input": asked, "output": text} for asked, text in pairs] for pairs in prompts]
        requests: list[boundary.Request] = [({"input": query}, bucket) for bucket in buckets]
        found = self._run(self._member, requests)
        return once_more(found, lambda some: self._run(self._member, [requests[i] for i in some]))

    def candidates(self, query: str, count: int) -> list[str | None]:
        """Return so many sampled answers without examples."""
        return self._run(self._candidate, [({"input": query}, [])] * count)

    def from_words(self, words: ReleasedKeywords, query: str) -> str | None:
        """Return the text that the model makes of released keywords, without any example."""
        asked = ReleasedKeywords(words, ranked=words.ranked, query={"asked": self._shape.ask(query)})
        call: Runnable[Any, Any] = RunnableLambda(lambda _: asked) | self._from_words
        return self._run(call, [({}, [])])[0]

    def _run(self, member: Runnable[Any, Any], requests: list[boundary.Request]) -> list[str | None]:
        found = boundary.run_private(member, requests, max_concurrency=self._at_once)
        return [each if isinstance(each, str) else None for each in found]


@dataclass(frozen=True)
class Written:
    """The model's texts for one query and one sample of owners; None for a member that failed."""

    members: Sequence[str | None]
    zero_shot: str | None
    few_shot: str | None
    public: str | None = None


def write_members(
    author: Author, prompts: Sequence[Pairs], members: int, query: Row, file: PassFile, key: tuple[str, int]
) -> Written:
    """Return the file's texts for this key; let the model write them if they are missing, and add them to the file.

    ``prompts`` are a sample's (see `Sampler`). Raises `ModelUnavailable` if the model failed on every prompt; then
    nothing is kept.
    """
    if key not in file:
        keep(file, key, author.write(prompts, query.input))
    zero_shot, few_shot, *public = file[key][members:]
    return Written(file[key][:members], zero_shot, few_shot, *public)


def write_candidates(author: Author, query: Row, count: int, file: PassFile, name: str) -> list[str]:
    """Return the query's public candidates, from the file or written now. Raises as `write_members` does."""
    key = ("candidates", name, count)
    if key not in file:
        keep(file, key, author.candidates(query.input, count))
    return [text for text in file[key] if text]


def keep(file: PassFile, key: Key, texts: Sequence[str | None]) -> None:
    """Add texts to the file. Raises `ModelUnavailable` if there is none."""
    if all(text is None for text in texts):
        raise file.no_answer()
    file.add(key, list(texts))

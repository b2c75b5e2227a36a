"""Chains around a release: members made from settings, and from released keywords back to a text.

``dpicl answer`` and ``dpicl serve`` make their members here. What follows a release is public all the way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseLanguageModel, LanguageModelLike
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_dpicl import local
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.reading import answer_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require
from langchain_dpicl.members.scoring import LabelScorer

RANKED = " with the following word suggestions ranked by their frequency from high to low: {words}"
UNRANKED = " with the following word suggestions: {words}"


@dataclass(frozen=True)
class ModelChoice:
    """An embedded model by its name (default: the usual one), or one behind an OpenAI-compatible server.

    The key of a server is read from the environment variable ``key_from``.
    """

    name: str | None = None
    url: str | None = None
    key_from: str = "OPENAI_API_KEY"

    @property
    def is_embedded(self) -> bool:
        """True if it runs in this process."""
        return self.url is None and (self.name is None or self.name in local.KNOWN_MODELS)

    @property
    def key(self) -> str:
        """The key of a server."""
        return os.environ.get(self.key_from, "none")

    def load(self, **settings: Any) -> BaseLanguageModel[Any]:
        """The LangChain model. Raises `MissingExtra` if it needs langchain-openai and that is not there."""
        if self.is_embedded:
            return local.local_llm(self.name or local.DEFAULT_MODEL, **settings)
        if self.url:
            settings |= {"base_url": self.url, "max_retries": 0}  # of a prompt that may have killed its server
        settings |= {"model": self.name or "default", "api_key": self.key}
        model: BaseLanguageModel[Any] = require("langchain_openai", "openai").ChatOpenAI(**settings)
        return model


def label_member(model: ModelChoice, labels: list[str], query_key: str, **settings: Any) -> LabelScorer:
    """A member that chooses among labels."""
    if model.is_embedded:
        # The embedded base model follows examples better without an instruction, and returns as many alternatives as
        # asked.
        settings = {"instruction": "", "top_logprobs": 100, **settings}
    return LabelScorer(model.load(), labels, query_key=query_key, **settings)


@dataclass(frozen=True)
class Wording:
    """The prompt of a member that writes texts: an instruction, the examples, and the query as one more of them."""

    input_key: str
    output_key: str
    instruction: str | None = None

    @property
    def asked(self) -> str:
        """The instruction, without a full stop."""
        return self.instruction or f"Write the {self.output_key} for the {self.input_key}"

    def field(self, text: object) -> str:
        """The query, and the beginning of its answer."""
        return f"{self.input_key.capitalize()}: {text}\n{self.output_key.capitalize()}:"

    def member(self, model: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """A chain that writes one answer with this model."""

        def fill(values: dict[str, Any]) -> str:
            examples = format(values["examples"])
            shown = f"{examples}\n\n" if examples else ""
            return f"{self.asked}.\n\n{shown}{self.field(values[self.input_key])}"

        return RunnableLambda(fill) | model | StrOutputParser() | self.first_answer()

    def first_answer(self) -> Runnable[Any, Any]:
        """The first paragraph of a model's answer, without the next example that it may have begun."""
        following = f"\n{self.input_key.capitalize()}:"

        def first(text: str) -> str:
            answer = answer_of(text) or ""
            return answer.strip().split("\n\n")[0].split(following)[0].strip()

        return RunnableLambda(first)


def read_lines(name: str, path: str | Path) -> list[str]:
    """The lines of a public file that are not empty; `InvalidParameter` under this name if it cannot be read."""
    try:
        return [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = type(error).__name__
    raise InvalidParameter(name, str(path), f"a readable UTF-8 file ({reason})")


def keywords_to_answer(llm: LanguageModelLike, prompt: str | BasePromptTemplate[Any]) -> Runnable[Any, Any]:
    """A Runnable that writes an answer from released keywords: ``release | keywords_to_answer(llm, prompt)``.

    Only the keywords and the caller's own query reach the model, so this is post-processing, at no further cost.

    Parameters
    ----------
    llm
        The model that writes.
    prompt
        A template (or its text) with ``{suggestions}`` and any of the query's own keys, such as
        ``"Summarize the dialogue{suggestions}.\\n\\n{input}\\nSummary:"``. ``{suggestions}`` becomes " with the
        following word suggestions: ...", for ranked keywords "... ranked by their frequency from high to low: ...", and
        nothing if there are none: that is the zero-shot fallback.

    The answer is a string, or ``{"answer": ..., "receipt": ...}`` if the release came with its receipt.
    """
    template: object = prompt
    if isinstance(prompt, str):
        with contextlib.suppress(ValueError):  # a template that cannot be read is refused below
            template = PromptTemplate.from_template(prompt)
    variables = template.input_variables if isinstance(template, BasePromptTemplate) else []
    if not isinstance(template, BasePromptTemplate) or "suggestions" not in variables or not all(variables):
        raise InvalidParameter("prompt", prompt, "a template with the variable {suggestions}")

    def fields(released: Any) -> dict[str, Any]:
        if not isinstance(released, ReleasedKeywords):
            raise InvalidParameter("input", type(released).__name__, "keywords as a release of Keywords gives them")
        lead = RANKED if released.ranked else UNRANKED
        return {**released.query, "suggestions": lead.format(words=", ".join(released)) if released else ""}

    write = RunnableLambda(fields) | template | llm | StrOutputParser()
    with_receipt = RunnablePassthrough.assign(answer=itemgetter("answer") | write)

    def choose(released: Any) -> Runnable[Any, Any]:
        return with_receipt if isinstance(released, Mapping) else write

    return RunnableLambda(choose, name="keywords_to_answer")

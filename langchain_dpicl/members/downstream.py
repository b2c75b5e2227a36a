"""From released keywords back to a text: public all the way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.errors import InvalidParameter

RANKED = " with the following word suggestions ranked by their frequency from high to low: {words}"
UNRANKED = " with the following word suggestions: {words}"


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

"""Questions over private documents: how a row reads, and that every document fits beside a question."""

from __future__ import annotations

from collections.abc import Callable

from langchain_dpicl.decoding.exemplars import Exemplars
from langchain_dpicl.decoding.model import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.selection import PoissonExampleSelector

_AT_ONCE = 4096
_LONGEST = 2**20
_WORD = " a"
"""A token of every vocabulary."""


def document_template(selector: PoissonExampleSelector, instruction: str) -> DemonstrationTemplate:
    """A document, an empty line, the instruction, and the question that the model answers."""
    if selector.nearest_to is None:
        bound = "given, or a threshold: which documents a question is answered from"
        raise InvalidParameter("nearest_to", None, bound)
    if not isinstance(instruction, str):
        raise InvalidParameter("instruction", type(instruction).__name__, "a text")
    said = "".join(f"{line}\n" for line in instruction.strip().replace("{", "{{").replace("}", "}}").splitlines())
    question = f"{said}Question: {{{selector.nearest_to}}}\nAnswer:"
    return DemonstrationTemplate(f"Document: {{{selector.store.input_key}}}\n\n", question)


def fit_documents(exemplars: Exemplars, nearest_to: str, question_tokens: int) -> None:
    """See that every document leaves room for a question of so many tokens, and let no longer question pass.

    Raises `InvalidRecords`, which counts the documents that the model does not read as a whole.
    """
    template, store = exemplars.template, exemplars.store
    question = template.ask({nearest_to: _WORD * question_tokens})

    def text(length: int) -> str:  # by the letter: no document that fits here is longer than the longest one
        return template.show({store.input_key: (_WORD * length)[:length]})

    def fits(length: int) -> bool:
        return exemplars.fits(text(length), question)

    if not fits(1):
        bound = "so few that the model reads such a question, a document and an answer together"
        raise InvalidParameter("question_tokens", question_tokens, bound)
    longest = _last(fits)
    unread = 0
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        for start in range(0, len(rows), _AT_ONCE):
            shown = map(template.show, view.read(rows[start : start + _AT_ONCE]))
            unread += sum(not exemplars.fits(text, question) for text in shown)
    if unread:
        raise InvalidRecords(
            f"{unread} of the documents are longer than about {longest // len(_WORD)} tokens, what the model reads "
            f"beside a question of {question_tokens} tokens and an answer, or no Unicode: split them "
            "(`split_with_parents`, or a text splitter)"
        )
    exemplars.longest = text(longest)


def _last(fits: Callable[[int], bool]) -> int:
    """The largest number that fits; 1 does."""
    low, high = 1, 2
    while high < _LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

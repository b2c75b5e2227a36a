"""Questions over private documents: how a row reads, and which documents fit beside a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.decoding.backends.server_model import ServerLogits
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import DemonstrationTemplate, LogitsModel, attempt, reads
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.local import DEFAULT_MODEL
from langchain_dpicl.members.chains import ModelChoice
from langchain_dpicl.store import ExemplarStore

_AT_ONCE = 4096
_LONGEST = 2**20
_WORD = " a"
"""A token of every vocabulary."""


def document_template(input_key: str, question_key: str, instruction: str = "") -> DemonstrationTemplate:
    """A document, an empty line, the instruction, and the question that the model answers."""
    if not isinstance(instruction, str):
        raise InvalidParameter("instruction", type(instruction).__name__, "a text")
    said = "".join(f"{line}\n" for line in instruction.strip().replace("{", "{{").replace("}", "}}").splitlines())
    return DemonstrationTemplate(f"Document: {{{input_key}}}\n\n", f"{said}Question: {{{question_key}}}\nAnswer:")


def logits_of(choice: ModelChoice, folder: Path = Path(), end: Sequence[str] = ()) -> LogitsModel:
    """Return the model that writes from documents: an embedded one, one in a file or folder, or on a server."""
    if isinstance(choice.url, str):
        return ServerLogits(choice.url, choice.name or "default", end, api_key=choice.key)
    if choice.is_embedded:
        return TransformersLogits(choice.name or DEFAULT_MODEL)
    return TransformersLogits(folder / str(choice.name))


class Documents:
    """The documents that a model reads beside a question of ``question_tokens`` and an answer of ``tokens``.

    One that it does not read, for its length or as no Unicode, has no part in any answer: its own text alone decides.
    ``longest`` is the longest document that fits, of about ``most_tokens`` tokens. Both are public. `InvalidParameter`
    if none fits.
    """

    def __init__(
        self,
        model: LogitsModel,
        template: DemonstrationTemplate,
        input_key: str,
        question_tokens: int,
        tokens: int,
    ) -> None:
        self._model, self._template, self._tokens = model, template, tokens
        self._beside = template.ask(dict.fromkeys(template.query_keys, _WORD * question_tokens))

        def text(length: int) -> str:  # by the letter: no document that fits here is longer than the longest one
            return template.show({input_key: (_WORD * length)[:length]})

        def fits(length: int) -> bool:
            return reads(model, text(length), self._beside, tokens)

        if not fits(1):
            raise InvalidParameter(
                "question_tokens",
                question_tokens,
                "so few that the model reads such a question, a document and an answer together",
            )
        letters = _last(fits)
        self.longest = text(letters)
        self.most_tokens = letters // len(_WORD)

    def fits(self, document: Mapping[str, Any]) -> bool:
        """Return whether the model reads a document. Private."""

        def shown() -> bool:
            return reads(self._model, self._template.show(document), self._beside, self._tokens)

        return bool(attempt(shown))


@dataclass(frozen=True, repr=False)
class DocumentReport:
    """The number of documents in a store, and of those that have no part in answers.

    PRIVATE: exact counts, for the operator who may see the records.

    Attributes
    ----------
    documents
        All of the store's.
    left_out
        Those that the model does not read as a whole beside a question of ``question_tokens`` and an answer: split
        them. Beside a shorter question there may be room.
    most_tokens
        About how many tokens a document may have. Public.
    """

    documents: int
    left_out: int
    most_tokens: int


def report_on(store: ExemplarStore, documents: Documents) -> DocumentReport:
    """Read all documents of a store. Private."""
    left_out = 0
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        for start in range(0, len(rows), _AT_ONCE):
            left_out += sum(not documents.fits(each) for each in view.read(rows[start : start + _AT_ONCE]))
    return DocumentReport(len(rows), left_out, documents.most_tokens)


def _last(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits; 1 does."""
    high = 2
    while high < _LONGEST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low

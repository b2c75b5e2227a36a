"""Views of a text: further vectors beside the store's, such as the embedding of its first two words.

**What they are.** A `View` is public: a map from one text to another, and an embedding model of the result. A head that
looks at several views joins their vectors into one of norm at most 1: each is multiplied by its weight over the root of
the sum of all squared weights. The joined vectors of public texts give the directions on which all are projected, by
the exact products of `once.steps`.

**An owner's vectors are its own.** The view `whole` has the store's vectors, which are not made again. Any other is
computed after the charge, record by record, as label scores are: a private call for each text, on a copy of the view,
between two good probes (`once.probing`). A view that fails on a text, or that finds nothing in it, adds nothing: its
part of the joined vector is that of the public texts' mean, and the other views stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig

from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.once.probing import Probes, TextRow, TextRows, probes_of
from langchain_dpicl.once.steps import MOST_FEATURES, FeatureMap, Floats, OwnedRecords
from langchain_dpicl.privacy import checks
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import embedder_of
from langchain_dpicl.store.records import Vectors, aattempt, as_matrix, attempt, embed

_MOST_WEIGHT = 2.0**10
_MOST_WORDS = 10**6
_OPENING = re.compile(r"opening:([1-9][0-9]{0,5})")
_BYTES = 4  # of a number in a vector


@dataclass(frozen=True)
class View:
    """One way to look at a text: a public map to another text, and the model that embeds the result.

    Parameters
    ----------
    name
        Stands in the head's file.
    text_of
        Gives a text for a text, such as its last line; an empty one if there is nothing to see. It must be a pure
        function that computes at once: a record's view must depend on that record alone. Default: the text itself.
    embeddings
        A model that reads each text alone, to the last bit. Default: that of the store.
    weight
        The factor of its vectors, beside the other views'.

    Raises `InvalidParameter`.
    """

    name: str
    text_of: Callable[[str], str] | None = None
    embeddings: Embeddings | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "," in self.name:
            raise InvalidParameter("name", self.name, "a name of a view, without commas")
        if self.text_of is not None and not callable(self.text_of):
            raise InvalidParameter("text_of", type(self.text_of).__name__, "a function from a text to a text")
        if self.embeddings is not None and not isinstance(self.embeddings, Embeddings):
            raise InvalidParameter("embeddings", type(self.embeddings).__name__, "LangChain embeddings")
        object.__setattr__(self, "weight", checks.real("weight", self.weight, above=0.0, at_most=_MOST_WEIGHT))
        if self.is_whole and self.name != "whole":
            raise InvalidParameter("text_of", None, "a function, or embeddings: without both it is `whole`")

    @property
    def is_whole(self) -> bool:
        """Return whether its vectors are the store's."""
        return self.text_of is None and self.embeddings is None

    def said_of(self, text: str) -> str:
        """The text that it sees. Raises whatever ``text_of`` raises, and `TypeError` for what is no text."""
        said = text if self.text_of is None else self.text_of(text)
        if not isinstance(said, str):
            raise TypeError("a view gives a text")
        return said

    def calls(self, embeddings: Embeddings) -> TextRows:
        """The calls that give a text's vector: its bytes, or nothing for a text without it."""
        model = self.embeddings or embeddings

        def row(text: str, config: RunnableConfig | None) -> TextRow:
            said = self.said_of(text)
            return [as_matrix(model.embed_documents([said]), 1).tobytes()] if said.strip() else []

        return TextRows(row, f"vectors of the view {self.name!r}", "viewing", model)


@dataclass(frozen=True)
class Opening:
    """The first words of a text."""

    words: int

    def __call__(self, text: str) -> str:
        return " ".join(text.split()[: self.words])


whole = View("whole")
"""The view of a store: the embedding of the whole text, which it keeps."""


def opening(words: int, *, weight: float = 0.7) -> View:
    """The view of a text's first words: what is asked for often stands there. Raises `InvalidParameter`.

    The usual ``weight`` was chosen on training questions of TREC among .5, .7, 1 and 1.4.
    """
    checked = checks.whole("words", words, at_most=_MOST_WORDS)
    return View(f"opening:{checked}", Opening(checked), weight=weight)


def built_in(name: str) -> View | None:
    """The view of this package with that name, ``whole`` or ``opening:2``; None for any other name."""
    if name == "whole":
        return whole
    words = _OPENING.fullmatch(name)
    return None if words is None else opening(int(words[1]))


def views_named(text: str) -> list[View]:
    """The built-in views of a list of names such as ``whole,opening:2``. Raises `InvalidParameter`."""
    found = []
    for name in text.split(","):
        view = built_in(name.strip())
        if view is None:
            raise InvalidParameter("views", text, "names separated by commas: whole, opening:2 (any number of words)")
        found.append(view)
    return checked_views(found)


def checked_views(views: object) -> list[View]:
    """The views, checked. Raises `InvalidParameter`."""
    if not isinstance(views, Sequence) or not views or not all(isinstance(each, View) for each in views):
        raise InvalidParameter("views", type(views).__name__, "a list of views, such as [whole, opening(2)]")
    names = [view.name for view in views]
    if len(set(names)) < len(names):
        raise InvalidParameter("views", names, "views of distinct names")
    for view in views:
        usual = built_in(view.name)
        if usual is not None and (view.text_of, view.embeddings) != (usual.text_of, None):
            raise InvalidParameter("views", view.name, "another name: it is that of a built-in view")
    return list(views)


@dataclass(frozen=True, eq=False)
class JoinedViews:
    """Views, the number of ``dimensions`` of each one's vectors, and their probes, if made in this process. Public."""

    views: tuple[View, ...]
    dimensions: tuple[int, ...]
    probes: tuple[Probes | None, ...] = ()

    @classmethod
    def of_whole(cls, dimension: int) -> JoinedViews:
        """The store's vectors alone."""
        return cls((whole,), (dimension,))

    @classmethod
    def of(
        cls, views: Sequence[View], store: ExemplarStore, texts: Sequence[str], others: Sequence[str], progress: bool
    ) -> tuple[JoinedViews, Floats | None]:
        """Try the views on public ``texts``, or on ``others`` if there are none. Give the texts' joined vectors, too.

        Raises `InvalidParameter`, and what `TextRows.of_public` does.
        """
        dimensions: list[int] = []
        probes: list[Probes | None] = []
        parts: list[Sequence[Any]] = []
        for view in views:
            if view.is_whole:
                found: Any = embed(store.embeddings, texts, progress) if texts else ()
                parts.append(found)
                dimensions.append(store.dimension)
                probes.append(None)
                continue
            tried = texts or others
            rows = view.calls(store.embeddings).of_public(tried, progress)
            sizes = {len(row[0]) // _BYTES for row in rows if row}
            if len(sizes) != 1:
                bound = "a view that sees something in a public text, in vectors of one length"
                raise InvalidParameter("views", view.name, bound)
            parts.append(rows)
            dimensions += sizes
            probes.append(probes_of(tried, rows, bool))
        if sum(dimensions) >= MOST_FEATURES:
            raise InvalidParameter("views", f"{sum(dimensions)} numbers in all", f"fewer than {MOST_FEATURES}")
        made = cls(tuple(views), tuple(dimensions), tuple(probes))
        return made, made.joined(parts, None) if texts else None

    @property
    def dimension(self) -> int:
        """The number of numbers in a joined vector."""
        return sum(self.dimensions)

    @property
    def is_whole(self) -> bool:
        """Return whether these are the store's vectors alone."""
        return len(self.views) == 1 and self.views[0].is_whole

    @property
    def facts(self) -> list[dict[str, Any]]:
        """For the head's file, from which `read` makes an equal object."""
        return [
            {
                "name": view.name,
                "weight": view.weight,
                "model": None if view.embeddings is None else embedder_of(view.embeddings),
                "dimension": dimension,
            }
            for view, dimension in zip(self.views, self.dimensions, strict=True)
        ]

    @staticmethod
    def checked(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The facts in a head's file. Raises whatever it may if they are not those of views."""
        found = [
            {
                "name": str(each["name"]),
                "weight": checks.real("weight", each["weight"], above=0.0, at_most=_MOST_WEIGHT),
                "model": None if each["model"] is None else str(each["model"]),
                "dimension": checks.whole("dimension", each["dimension"], at_most=MOST_FEATURES),
            }
            for each in facts
        ]
        if not found or found != [dict(each) for each in facts]:
            raise ValueError("other facts")
        return found

    @classmethod
    def read(cls, facts: Sequence[Mapping[str, Any]], given: Sequence[View]) -> JoinedViews:
        """From `checked` facts, and the ``given`` views of those that are not built in. Raises `InvalidParameter`."""
        own = {view.name: view for view in given}
        views = []
        for fact in facts:
            view = own.pop(fact["name"], None) or built_in(fact["name"])
            if view is None:
                raise InvalidParameter("views", [view.name for view in given], f"with {fact['name']!r}, as in the fit")
            model = None if view.embeddings is None else embedder_of(view.embeddings)
            if model != fact["model"]:
                raise InvalidParameter("views", model, f"{fact['model']}, the model of the view {view.name!r}")
            views.append(replace(view, weight=fact["weight"]))
        if own:
            raise InvalidParameter("views", sorted(own), "left out: the head does not look at these")
        return cls(tuple(views), tuple(fact["dimension"] for fact in facts))

    # -- private texts -------------------------------------------------------------------------------------------------

    def seen(
        self, records: OwnedRecords, texts: Sequence[str], features: FeatureMap, store: ExemplarStore, progress: bool
    ) -> Flow[tuple[OwnedRecords, int]]:
        """The records with the features of all views. Private. With the number of parts that add nothing by a fault.

        The records come with the store's vectors, and with their ``texts``. Raises `ModelLost`.
        """
        parts: list[Sequence[Any]] = []
        lost = 0
        for view, probes in zip(self.views, self.probes, strict=True):
            rows: Any = records.features
            if not view.is_whole:
                rows = yield from view.calls(store.embeddings).rows(texts, progress, probes)
                lost += sum(not isinstance(row, list) for row in rows)
            parts.append(rows)
        found = yield partial(self._features, features, parts)
        return replace(records, features=found), lost

    def _features(self, features: FeatureMap, parts: Sequence[Sequence[Any]]) -> Vectors:
        return features.features(self.joined(parts, features.mean)).astype(np.float32)

    # -- public texts --------------------------------------------------------------------------------------------------

    def said_of(self, text: str) -> list[str]:
        """The texts that the views see in a question. Raises `ModelUnavailable` if one fails."""
        found = []
        for view in self.views:
            said, fault = attempt(view.said_of, text)
            if fault:
                raise ModelUnavailable(f"the view {view.name!r} failed on public text ({fault})")
            found.append(said)
        return found

    async def of_questions(
        self,
        said: Sequence[Sequence[str]],
        embeddings: Embeddings,
        call: Callable[[Embeddings], Callable[[list[str]], Awaitable[Any]]],
        mean: Floats | None,
    ) -> Floats:
        """The joined vectors of questions, given by the texts that the views see. ``call`` gives a model's function.

        Raises `ModelUnavailable`, and `InvalidParameter` for vectors of another length.
        """
        parts: list[Sequence[Any]] = []
        for place, (view, dimension) in enumerate(zip(self.views, self.dimensions, strict=True)):
            texts = [each[place] for each in said]
            asked = [i for i, text in enumerate(texts) if text.strip()]
            part: list[TextRow] = [[] for _ in texts]
            if asked:
                answer, fault = await aattempt(call(view.embeddings or embeddings), [texts[i] for i in asked])
                if fault:
                    raise ModelUnavailable(fault)
                matrix = as_matrix(answer, len(asked))
                if matrix.shape[1] != dimension:
                    raise InvalidParameter("vectors", f"{matrix.shape[1]} dimensions", f"{dimension}, as at the fit")
                for i, vector in zip(asked, matrix, strict=True):
                    part[i] = [vector.tobytes()]
            parts.append(part)
        return self.joined(parts, mean)

    def joined(self, parts: Sequence[Sequence[Any]], mean: Floats | None) -> Floats:
        """Vectors of norm at most 1, one for each text, from the views' vectors or `TextRow`s. A row is its text's own.

        What is no vector is the view's part of the ``mean``, so that `FeatureMap` makes nothing of it.
        """
        length = math.sqrt(math.fsum(view.weight**2 for view in self.views))
        found = []
        first = 0
        for view, dimension, rows in zip(self.views, self.dimensions, parts, strict=True):
            part = np.zeros((len(rows), dimension))
            if mean is not None:
                part += mean[first : first + dimension]
            for place, row in enumerate(rows):
                vector = row if isinstance(row, np.ndarray) else _vector(row)
                if len(vector) == dimension:
                    part[place] = vector.astype(np.float64) * (view.weight / length)
            found.append(part)
            first += dimension
        return np.concatenate(found, axis=1)


def _vector(row: Any) -> Vectors:
    """The vector in a `TextRow`; one without numbers for what is none."""
    return np.frombuffer(row[0] if isinstance(row, list) and row else b"", np.float32)

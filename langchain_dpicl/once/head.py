"""PrivateHead: a linear classifier on the store's embeddings, fitted once with privacy, that answers for ever."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableConfig
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from langchain_dpicl.aggregators.votes import check_labels
from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import awaitable, immediate
from langchain_dpicl.durable import replacing, sync_folder, writing
from langchain_dpicl.errors import (
    DPICLError,
    InvalidParameter,
    ModelUnavailable,
    PrivacyWarning,
)
from langchain_dpicl.once.fallback import HeadThenRelease
from langchain_dpicl.once.fitting import Fit, FitReport
from langchain_dpicl.once.scores import CalibratedScores, LabelScores, ScoreRow
from langchain_dpicl.once.steps import FeatureMap, Floats
from langchain_dpicl.once.sums import CheckedOpening, on_budget
from langchain_dpicl.once.terms import PrivateTerms
from langchain_dpicl.once.terms_reading import term_of
from langchain_dpicl.once.views import JoinedViews, View, checked_views, whole
from langchain_dpicl.privacy import checks
from langchain_dpicl.release.base import AnyRelease, warn_of_delta
from langchain_dpicl.release.threshold import public_texts
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import embedder_of
from langchain_dpicl.store.records import Vectors, aattempt, as_matrix

_FEW_OWNERS = 100
_FORMAT = "dpicl-head-1"
_HALF = re.compile("[\ud800-\udfff]")
_RECEIPT = TypeAdapter(Receipt)


class HeadAnswer(TypedDict):
    """A head's answer: the most probable label, its probability, and that of every label."""

    label: str
    confidence: float
    scores: dict[str, float]


class PrivateHead(Runnable[Any, HeadAnswer]):
    """A multinomial linear model over a store's embeddings: `fit` it once, ask it for ever.

    Mechanism. T steps of gradient descent over ALL owners. In each step an owner's summed gradient is clipped to norm 1
    and rounded towards 0 on a lattice, the owners are summed exactly, and discrete Gaussian noise of standard deviation
    sigma is added to every number of the sum (`once.steps`). The weights are a function of the T noisy sums and of
    public numbers.

    Neighbours and sensitivity. One owner added or removed, with all its records, at a rate of 1: each step's sum moves
    by at most 1. T steps together have the profile of one Gaussian with noise multiplier sigma / sqrt(T).

    What it answers afterwards is post-processing: any number of questions, by any caller, without noise, charge or
    ledger. A question is a text, or a mapping with ``input_key``; the answer is a `HeadAnswer`. ``invoke`` and its kin
    embed the question, `answers` takes vectors. A head may look at further ``views`` of a text, and at a model's label
    ``scores`` (a model call for each question, on public text): `answers` is refused then. To forget an owner takes a
    new head, and a new share of budget.

    Attributes
    ----------
    labels
        In the order of the rows of ``weights``.
    receipt
        What the fit cost.
    embedder
        The name of the embedding model of the store that it was fitted on (`ExemplarStore.embedder`).
    fit_report
        PRIVATE, for the operator: how many records were left out (`FitReport`). The object that `fit` returns has it
        alone; neither a file, nor a pickle, nor a copy has it. None if the ledger had the finished head.
    """

    fit_report: FitReport | None = None

    def __init__(
        self,
        weights: Floats,
        labels: Sequence[str],
        features: FeatureMap,
        embeddings: Embeddings,
        receipt: Receipt,
        *,
        embedder: str,
        input_key: str = "input",
        views: JoinedViews | None = None,
        scores: CalibratedScores | None = None,
    ) -> None:
        self.weights = weights
        self.labels = tuple(labels)
        self.features = features
        self.embeddings = embeddings
        self.embedder = embedder
        self.receipt = receipt
        self.input_key = input_key
        self.views = views or JoinedViews.of_whole(features.dimension)
        self.scores = scores
        self._none: tuple[float, str] | None = None

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def InputType(self) -> Any:
        """A text, or a mapping with ``input_key`` and nothing else: what a server's requests are checked against."""
        text = Annotated[str, Field(pattern=r"\S")]
        question = TypedDict("HeadQuestion", {self.input_key: text})  # type: ignore[misc]
        cast("Any", question).__pydantic_config__ = ConfigDict(extra="forbid")
        return text | question

    @property
    def takes_vectors(self) -> bool:
        """Return whether the store's embedding of a question is all that the head looks at."""
        return self.scores is None and self.views.is_whole

    def answers(self, vectors: Vectors) -> list[HeadAnswer]:
        """The answer to each question, given by its embedding. Refused if the head looks at more than that."""
        if not self.takes_vectors:
            bound = "texts, for invoke or batch: the head looks at views, or at label scores"
            raise InvalidParameter("vectors", "no texts", bound)
        return self._labelled(as_matrix(vectors, len(vectors)), [])

    def _labelled(self, rows: NDArray[np.floating], scored: list[ScoreRow | None]) -> list[HeadAnswer]:
        if rows.shape[1] != self.features.dimension:
            raise InvalidParameter(
                "vectors",
                f"{rows.shape[1]} dimensions",
                f"{self.features.dimension}, as the store",
            )
        features = self.features.features(rows)
        if self.scores is not None:
            features = self.scores.joined(features, scored)
        # The softmax of W x, for each question.
        scores = features / self.features.unit @ self.weights.T
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        found = powers / powers.sum(axis=1, keepdims=True)
        best = found.argmax(axis=1).tolist()
        return [
            {
                "label": self._label(i, row[i]),
                "confidence": row[i],
                "scores": dict(zip(self.labels, row, strict=True)),
            }
            for i, row in zip(best, found.tolist(), strict=True)
        ]

    def _label(self, place: int, confidence: float) -> str:
        if self._none is not None and confidence < self._none[0]:
            return self._none[1]
        return self.labels[place]

    def with_none(self, below: float, label: str = "none of these") -> PrivateHead:
        """A copy of this head that answers ``label`` where its confidence is below ``below``.

        Nothing is paid for it: the choice follows from the released head and the question. ``below`` must be public,
        such as a number that suits public texts. `save` keeps both.
        """
        if not isinstance(label, str) or not label.strip() or label in self.labels:
            raise InvalidParameter("label", label, "a text that is not empty, and none of the labels")
        made = copy.copy(self)
        made._none = checks.real("below", below, above=0.0, at_most=1.0), label
        return made

    def _text(self, question: Any) -> str:
        text = question.get(self.input_key) if isinstance(question, Mapping) else question
        if not isinstance(text, str) or not text.strip():
            given = "a blank text" if isinstance(text, str) else type(text).__name__
            raise InvalidParameter("input", given, f"a text with words, or a mapping with {self.input_key!r}")
        if _HALF.search(text):
            raise InvalidParameter("input", "half a surrogate pair", "a text in Unicode")
        return text

    async def _answers_to(self, questions: list[Any], row: Any, call: Any) -> list[HeadAnswer | Exception]:
        """The answers, and the errors of what is no question, fails a view, or has no label scores.

        ``row`` gives a text's label scores (None: the head looks at none), and ``call`` the function of a model that
        gives texts' embeddings, as of records, which questions resemble. Both functions are awaited.
        """
        found: list[Any] = []
        for question in questions:
            try:
                text = self._text(question)
                said = self.views.said_of(text)
                scored = None
                if row is not None:
                    scored, fault = await aattempt(row, text)
                    if fault:
                        raise ModelUnavailable(f"the model of the label scores failed on public text ({fault})")
                found.append((said, scored))
            except DPICLError as error:
                found.append(error)
        asked = [each for each in found if not isinstance(each, Exception)]
        if not asked:
            return found
        try:
            rows = await self.views.of_questions(
                [said for said, _ in asked],
                self.embeddings,
                call,
                self.features.mean,
            )
            answers = iter(self._labelled(rows, [scored for _, scored in asked]))
            return [each if isinstance(each, Exception) else next(answers) for each in found]
        except DPICLError as error:
            fault = str(error)
        raise ModelUnavailable(f"the embedding model failed on public text ({fault})")

    def _answer_all(self, questions: list[Any]) -> list[HeadAnswer | Exception]:
        row = None if self.scores is None else awaitable(self.scores.scores.row)
        return immediate(self._answers_to(questions, row, lambda model: awaitable(model.embed_documents)))

    async def _aanswer_all(self, questions: list[Any]) -> list[HeadAnswer | Exception]:
        row = None if self.scores is None else self.scores.scores.arow
        return await self._answers_to(questions, row, lambda model: model.aembed_documents)

    def _answer(self, question: Any) -> HeadAnswer:
        return _only(self._answer_all([question]))

    async def _aanswer(self, question: Any) -> HeadAnswer:
        return _only(await self._aanswer_all([question]))

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> HeadAnswer:
        """The answer to one question."""
        return self._call_with_config(self._answer, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> HeadAnswer:
        """The same, asynchronously."""
        return await self._acall_with_config(self._aanswer, input, config)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """The answers to many questions, which are embedded together."""
        if not inputs:
            return []
        return self._batch_with_config(self._answer_all, inputs, config, return_exceptions=return_exceptions)

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """The same, asynchronously."""
        return await self._abatch_with_config(self._aanswer_all, inputs, config, return_exceptions=return_exceptions)

    def with_private_fallback(self, release: AnyRelease[Any], below: float = 0.6) -> HeadThenRelease:
        """Ask a private ``release`` whatever the head's confidence is below ``below`` for; the head answers the rest.

        The answer is ``{"answer": ..., "receipt": ...}``, and the receipt's "path" is "head" or "release".
        """
        return HeadThenRelease(self, self.receipt, release, below)

    # -- fitting -------------------------------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        store: ExemplarStore,
        labels: Sequence[str],
        budget: PrivacyBudget | CheckedOpening,
        *,
        public: Sequence[str] | FeatureMap | None = None,
        views: Sequence[View] | None = None,
        scores: LabelScores | None = None,
        owners: int | None = None,
        output: str | Path | None = None,
        line: str | None = None,
        input_key: str = "input",
        progress: bool = False,
    ) -> PrivateHead:
        """Fit a head on all records of a store: one release, which is charged before the first step.

        Parameters
        ----------
        store
            Its outputs are the labels. A record whose output is none of ``labels`` contributes nothing; the operator
            reads in ``fit_report`` how many these are.
        labels
            The public list. One that no record has stays possible. Or `PrivateTerms` of whole outputs: outputs are
            compared with them without case, accents and punctuation.
        budget
            Has a line for the mechanism "head", whose rate is 1: for instance ``releases={"head": 12, "vote": ...}`` if
            a head is fitted each month, or a budget of its own. It counts all callers together (scope ``"shared"``). Or
            a function that opens it, called when all that needs no budget is checked: it gets a function that checks
            the rest on another budget, such as one in memory, and raises what would be raised.
        public
            Public texts that resemble the questions: the features are then their 64 principal directions. They must
            not come from the store. Default: the embeddings themselves, which costs little from some thousand owners
            on.
        views
            Views of a text whose vectors are joined, such as ``[whole, opening(2)]``. The default is the store's
            embedding of the whole text. Any other view is tried on the ``public`` texts (or else on the labels) before
            the charge, and computed after it, record by record, by private calls, with a public text after each. A view
            that fails on a record adds nothing to it (``fit_report`` counts it) and changes no other record. A fit that
            goes on computes all views again.
        scores
            A model's label scores of each record, as features beside the embedding's. They are calibrated by the
            ``public`` texts, before the charge. Records are scored after it, one by one, by private calls, with a
            public text after each: two calls for a record. A record that the model fails on keeps the features of its
            embedding (``fit_report`` counts them) and changes no other record. A fit that goes on scores all records
            again.
        owners
            The number of owners by which the sums are divided: declared once, and public. Default: what the budget's
            line was declared or frozen with, or else, when the plan is frozen, the store's.
        output
            A file for the head. Then an interrupted fit goes on when it is called again with the same settings: it is
            charged once. The ledger keeps its noisy sums, and ``FILE.part`` its name until the head is written. This
            needs a budget that replays (``replay=True`` or ``"principal"``) and has no tickets; otherwise a fit
            starts, and is charged, anew. Do not put back an older copy of the ledger while a fit is unfinished: it
            would repeat steps.
        line
            The budget's line, if it has several.
        progress
            Show bars on a terminal. They are the operator's: that of the scores counts private records.

        Raises `InvalidParameter`, `PlanMismatch`, `PrivacyBudgetExceeded`, `ModelUnavailable`, `StoreError`, which cost
        nothing, and after the charge `ReleaseFailed`, or `ModelLost` if the model of the scores does not come back.
        Warns (`PrivacyWarning`) of the accuracy to expect if there are fewer than 100 owners.
        """
        if not isinstance(store, ExemplarStore):
            raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
        if store.output_key is None:
            raise InvalidParameter("store", "no output_key", "a store whose records have outputs, the labels")
        names = check_labels("labels", labels)
        if not isinstance(input_key, str) or not input_key.strip():
            raise InvalidParameter("input_key", input_key, "a non-empty string")
        owners = None if owners is None else checks.whole("owners", owners)
        if scores is not None and not isinstance(scores, LabelScores):
            raise InvalidParameter("scores", type(scores).__name__, "LabelScores or None")
        if scores is not None and (public is None or isinstance(public, FeatureMap)):
            raise InvalidParameter(
                "public",
                type(public).__name__,
                "public texts, by which the scores are calibrated",
            )
        seen = JoinedViews.of_whole(store.dimension)
        texts: list[str] = []
        if public is not None and not isinstance(public, FeatureMap):
            texts = public_texts("public", public)
            if len(texts) < 2:
                raise InvalidParameter("public", len(texts), "at least two texts, better some hundred")
        joined = None
        if texts or views is not None:
            looked = [whole] if views is None else checked_views(views)
            seen, joined = JoinedViews.of(looked, store, texts, names, progress)
        if isinstance(public, FeatureMap):
            features = public
        else:
            features = FeatureMap(seen.dimension) if joined is None else FeatureMap.of(joined)
        calibrated = None if scores is None else scores.calibrated(texts, progress)
        if features.dimension != seen.dimension:
            raise InvalidParameter(
                "public",
                f"{features.dimension} dimensions",
                f"{seen.dimension}, as the views together" if views else f"{seen.dimension}, as the store",
            )
        about: dict[str, Any] = {"views": seen, "scores": calibrated, "line_name": line, "progress": progress}
        if isinstance(labels, PrivateTerms):
            about["matching"] = term_of

        def fit_on(budget: PrivacyBudget) -> Fit:
            return Fit(store, budget, names, features, owners, **about)

        fit = on_budget(fit_on, budget, store, output, "head")
        warn_of_delta(fit.budget, fit.owners, stacklevel=3)
        if fit.owners < _FEW_OWNERS:
            warnings.warn(
                f"a head for {fit.owners} owners: expect about {fit.expected_accuracy:.0%} right answers, where a "
                f"guess among {len(names)} labels is right in {1 / len(names):.0%} (so it was on four public tasks; "
                "others may differ by 20 points). The noise is as large as for many owners",
                PrivacyWarning,
                stacklevel=2,
            )

        def head_of(weights: Floats, receipt: Receipt) -> PrivateHead:
            return cls(
                weights,
                names,
                features,
                store.embeddings,
                receipt,
                embedder=store.embedder,
                input_key=input_key,
                views=seen,
                scores=calibrated,
            )

        head = fit.made(output, head_of)
        head.fit_report = fit.report
        return head

    # -- files ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "fit_report"}

    def save(self, path: str | Path) -> None:
        """Write the head to one file (npz, no pickle), which replaces an older one as a whole. It is public."""
        about = {
            "format": _FORMAT,
            "labels": self.labels,
            "embedder": self.embedder,
            "receipt": self.receipt,
            "input_key": self.input_key,
            **self.features.numbers,
        }
        if not self.views.is_whole:
            about["views"] = self.views.facts
        if self.scores is not None:
            about["scores"] = self.scores.facts
        if self._none is not None:
            about["none"] = self._none
        arrays = {"weights": self.weights, **self.features.arrays}
        with writing("path", path):
            with replacing(Path(path), mode=0o644) as file:
                cast("Any", np.savez)(file, about=np.array(json.dumps(about)), **arrays)
            sync_folder(Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        embeddings: Embeddings,
        *,
        llm: BaseLanguageModel[Any] | None = None,
        views: Sequence[View] = (),
    ) -> PrivateHead:
        """Read a file of `save`. ``embeddings``: the model of the store that the head was fitted on.

        ``llm``: the model of its label scores, if it looks at any. The file has their template and calibration.
        ``views``: its views that are not built in, which must be those of the fit: the file has their names, weights
        and models' names. Raises `InvalidParameter` for another file, and for another model (by its name) or view.
        """
        reason = "a head's file"
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name]) for name in file.files}
            about = json.loads(str(arrays.pop("about")), parse_constant=int)  # fails: NaN is no cost
            weights = np.asarray(arrays.pop("weights"), np.float64)
            if about.pop("format") != _FORMAT:
                raise ValueError
            labels = check_labels("labels", about.pop("labels"))
            embedder = str(about.pop("embedder"))
            receipt = _RECEIPT.validate_python(about.pop("receipt"))
            input_key = str(about.pop("input_key"))
            scored = about.pop("scores", None)
            seen = about.pop("views", None)
            below, label = about.pop("none", None) or (None, "")
            features: FeatureMap = cast("Any", FeatureMap)(**about, **arrays)
            size = features.size
            if scored is not None:
                scored = CalibratedScores.checked(scored)
                size += len(scored["mean"])
            if seen is not None:
                seen = JoinedViews.checked(seen)
                if sum(each["dimension"] for each in seen) != features.dimension:
                    raise ValueError
            if weights.shape != (len(labels), size) or not np.isfinite(weights).all():
                raise ValueError
        except OSError as error:
            reason = f"{reason} that can be read ({error.strerror or type(error).__name__})"
        except Exception:  # whatever a damaged archive makes its readers raise
            pass
        else:
            if (found := embedder_of(embeddings)) != embedder:
                raise InvalidParameter("embeddings", found, f"{embedder}, the model of the head's store")
            if scored is None and llm is not None:
                raise InvalidParameter("llm", embedder_of(llm), "left out: the head looks at no label scores")
            scores = None if scored is None else CalibratedScores.read(scored, llm)
            given = checked_views(views) if views else []
            head = cls(
                weights,
                labels,
                features,
                embeddings,
                receipt,
                embedder=embedder,
                input_key=input_key,
                views=JoinedViews.read(seen or JoinedViews.of_whole(features.dimension).facts, given),
                scores=scores,
            )
            return head if below is None else head.with_none(below, label)
        raise InvalidParameter("path", str(path), reason)

    @staticmethod
    def receipt_in(path: str | Path) -> Receipt:
        """Return the receipt in a file of `save`, without its models. Raises `InvalidParameter` for another file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                return _RECEIPT.validate_python(json.loads(str(file["about"]), parse_constant=int)["receipt"])
        except Exception:  # as in `load`
            reason = "a head's file that can be read"
        raise InvalidParameter("path", str(path), reason)

    def __repr__(self) -> str:
        return f"PrivateHead(labels={list(self.labels)}, embedder={self.embedder!r}, receipt={self.receipt['id']!r})"


def _only(answers: list[HeadAnswer | Exception]) -> HeadAnswer:
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer

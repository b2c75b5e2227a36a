"""The accuracy of a head, a classifier that is released once, beside votes on the same records, queries and epsilon."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.durable import replacing
from langchain_dpicl.errors import InvalidParameter, PrivacyWarning
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import HEAD, HEAD_PUBLIC, Score, Value
from langchain_dpicl.once.fitting import descend
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.once.scores import LabelScores
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum
from langchain_dpicl.once.sums import Sums
from langchain_dpicl.privacy.advice import head_steps
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import embedder_of
from langchain_dpicl.store.records import Vectors, embed

# Texts, their labels, and their embeddings.
Labelled = tuple[Sequence[str], Sequence[str], Vectors]


def fit_head(
    private: Labelled,
    embeddings: Embeddings,
    labels: Sequence[str],
    epsilon: float,
    delta: float,
    public: Sequence[str] | FeatureMap | None = None,
    *,
    scores: LabelScores | None = None,
    fits: int = 1,
    input_key: str = "input",
    even: bool = True,
) -> tuple[PrivateHead, float]:
    """Return a head, by the product's own release on a ledger that is thrown away, and the noise of a step (sigma).

    Each text is its own owner. ``fits``: how many fits the plan is for; this is one of them. ``input_key`` and
    ``scores``: the head's. Not ``even``: by the plan and the rule of an earlier release.
    """
    texts, outputs, vectors = private
    store = ExemplarStore.from_texts(
        texts,
        embeddings,
        outputs=outputs,
        vectors=vectors,
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # of few owners and large deltas: the accuracy shows them
        ledger = f"sqlite:///{folder}/budget.db"
        with contextlib.closing(
            PrivacyBudget(
                epsilon,
                delta,
                {"head": fits},
                ledger,
                replay=False,
            )
        ) as budget:
            if not even:
                about: dict[str, Any] = {"owners": len(texts), "options": {"step": 1.0 / LATTICE}}
                budget.line("head", 1.0, rate_is_explicit=True, **about)
            head = PrivateHead.fit(
                store,
                labels,
                budget,
                public=public,
                scores=scores,
                input_key=input_key,
                progress=False,
            )
            (line,) = budget.plan.lines.values()  # type: ignore[union-attr]
            return head, line.parameter


def head_without_noise(
    private: Labelled,
    embeddings: Embeddings,
    labels: Sequence[str],
    features: FeatureMap,
    *,
    sigma: float = 1e-9,
) -> PrivateHead:
    """Return the head that `fit_head` would make if no noise were added. NOT private.

    ``sigma``: the noise for which the steps are chosen; by default next to none.
    """
    texts, outputs, vectors = private
    place = {label: i for i, label in enumerate(labels)}
    held = features.features(vectors).astype(np.float32)
    records = OwnedRecords(held, np.array([place[output] for output in outputs]), np.arange(len(texts)))
    weights = descended(records, (len(labels), features.size), sigma, head_steps(len(labels)))
    return PrivateHead(
        weights,
        labels,
        features,
        embeddings,
        cast("Receipt", {}),  # it was not released
        embedder=embedder_of(embeddings),
    )


def descended(
    records: OwnedRecords,
    shape: tuple[int, int],
    sigma: float,
    steps: int,
    noise: Callable[[tuple[int, int]], NDArray[np.int64]] | None = None,
) -> NDArray[np.float64]:
    """Return the weights of a fit, as of single records' owners, with this ``noise`` on each sum. NOT private.

    ``sigma``: the noise for which the steps are chosen.
    """
    weigh = partial(descend, owners=len(records.owners), sigma=sigma, steps=steps, shape=shape)
    sums: Sums = []
    for _ in range(steps):
        total = clipped_sum(records, weigh(sums)[0])
        sums.append(total if noise is None else total + noise(shape))
    return weigh(sums)[1]


@dataclass(frozen=True, eq=False)
class HeadStudy:
    """The accuracy of a head, without noise and at each epsilon.

    - ``private``: the rows' texts, labels and embeddings; each row is its own owner.
    - ``asked``, ``right``: the queries' embeddings, and their labels.
    - ``public``: embeddings of public texts, whose principal directions make a second head; or none.
    - ``heads``: how many heads are fitted at each epsilon, each with noise of its own.
    - ``progress``: called after each fit.
    """

    labels: Sequence[str]
    private: Labelled
    asked: Vectors
    right: Sequence[str]
    public: Vectors | None
    embeddings: Embeddings
    plan: EvaluationPlan
    heads: int = 5
    progress: Callable[[], Any] = lambda: None

    @property
    def maps(self) -> dict[str, FeatureMap]:
        """The features of each method: the embeddings themselves, and public texts' directions."""
        found = {HEAD: FeatureMap(self.asked.shape[1])}
        if self.public is not None:
            found[HEAD_PUBLIC] = FeatureMap.of(self.public.astype(np.float64))
        return found

    def scores(self) -> list[Score]:
        """The main table's rows: each method without noise, and at each epsilon."""
        found = []
        for method, features in self.maps.items():
            known = {} if self.public is None or method == HEAD else {"public texts": float(len(self.public))}
            facts = {
                "owners": float(len(self.private[0])),
                "releases": 1.0,
                "delta": self.plan.delta,
                **known,
            }
            plain = self._answers(
                head_without_noise(
                    self.private,
                    self.embeddings,
                    self.labels,
                    features,
                )
            )
            found.append(self._score(method, None, [plain], known))
            for epsilon in self.plan.epsilons:
                answers, sigma = self._private(features, epsilon, 1)
                flipped = 100 * float(np.mean([row != plain for row in answers]))
                found.append(
                    self._score(
                        method,
                        epsilon,
                        answers,
                        {**facts, "sigma": sigma, "flipped": flipped},
                    )
                )
        return found

    def fits(self, counts: Sequence[int]) -> list[Score]:
        """An ablation: one of so many fits that share the plan's epsilon, as if records change and heads follow."""
        found = []
        for method, features in self.maps.items():
            for count in counts:
                for epsilon in self.plan.epsilons:
                    answers, sigma = self._private(features, epsilon, count)
                    found.append(self._score(method, epsilon, answers, {"fits": float(count), "sigma": sigma}, "fits"))
        return found

    def _private(
        self,
        features: FeatureMap,
        epsilon: float,
        fits: int,
    ) -> tuple[list[NDArray[Any]], float]:
        answers = []
        for _ in range(self.heads):
            head, sigma = fit_head(
                self.private,
                self.embeddings,
                self.labels,
                epsilon,
                self.plan.delta,
                features,
                fits=fits,
            )
            answers.append(self._answers(head))
            self.progress()
        return answers, sigma

    def _answers(self, head: PrivateHead) -> NDArray[Any]:
        return np.array([answer["label"] for answer in head.answers(self.asked)])

    def _score(
        self,
        method: str,
        epsilon: float | None,
        answers: Sequence[NDArray[Any]],
        facts: dict[str, float],
        study: str = "",
    ) -> Score:
        shares = [float((row == np.array(self.right)).mean()) for row in answers]
        return Score(
            method,
            epsilon,
            values={"accuracy": Value.of_shares(shares, len(self.right))},
            runs=len(answers),
            queries=len(self.right),
            facts=facts,
            study=study,
        )


def kept_vectors(path: Path, embeddings: Embeddings, parts: Mapping[str, Sequence[Row]]) -> dict[str, Vectors]:
    """Return the embeddings of each part's inputs. The file keeps them for the next time; it is as private as they are.

    Raises `StoreError` if the model fails, and `InvalidParameter` for a file that cannot be written.
    """
    kept: dict[str, Vectors] = {}
    with contextlib.suppress(Exception), np.load(path) as file:  # whatever a damaged archive makes its readers raise
        kept = {name: np.asarray(file[name], np.float32) for name in file.files}
    found, held = {}, {}
    for name, rows in parts.items():
        key = key_of(repr([embedder_of(embeddings), *(row.input for row in rows)]))
        found[name] = held[key] = kept[key] if key in kept else embed(embeddings, [row.input for row in rows], True)
    if held.keys() - kept.keys():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as out:
                cast("Any", np.savez)(out, **held)
        except OSError as failure:
            raise InvalidParameter("output", str(path), f"a folder that can be written ({failure})") from None
    return found

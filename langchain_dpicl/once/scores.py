"""A language model's label scores, as features of a head beside those of the embedding.

**What they are.** `LabelScores` is public: a model, a template around one text, and labels. It gives a text the
model's log-probability of each label after the filled template (`LabelScorer`, with no example). `CalibratedScores`
makes features of these: they lose their mean over PUBLIC texts (contextual calibration: a model prefers some labels
whatever the text), are measured in units of their spread over the same texts, and are scaled to norm at most 1 if they
are longer. Embedding and scores share the norm of 1: x = (sqrt(1 - share) e, sqrt(share) s).

**An owner's features are its own.** That each owner moves a sum by at most 1 takes features that are a function of one
record and of public values, to the last bit. So each private text is a call of its own, one after the other, on a copy
of the scorer that no public call uses, within the boundary, and no two texts share a request. The rest is up to the
model's server: if it reads prompts in batches, or keeps a prompt's state for the next one, the last bits of a text's
log-probabilities depend on other texts. No rounding mends that: some text lies at a step's edge. `local_llm` answers
one request at a time, from an empty cache. `LabelScores.calibrated` asks public texts again after others, and refuses a
model that gives one of them another bit.

**One text's failure is its own.** A text may end the model, or a quota, or leave the model with other answers. So a
public text, the probe, is scored after each private one, and must have the bits that it had at the start. Then every
private text is scored between two good probes, by a model in the state of the start:

- After a failure a second probe is asked too, the longest public text: what is left of a quota, or of the server's
  speed, may do for a short text alone. A text that fails twice, each time with both probes good after it, has scores
  of zero, as an average text has.
- After a bad probe the embedded model is opened anew, and one on a server waited for, until both probes are good. The
  text before the bad probe is scored again. If its last call ends with a bad probe too, it has scores of zero.
- If the probes are not good within `PATIENCE`, the fit ends with `ModelLost`, and can be resumed.

What is not seen: a model in another state that gives the probes the same bits, and one that is back in time for the
probe, though a private text found it otherwise. So the address must be one server's: behind a balancer, or a gateway
that keeps answers, a probe may meet another state than the texts.

From the log-probabilities on, all arithmetic is of single numbers, or exact (`once.steps`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig, RunnableLambda

from langchain_dpicl.aggregators.votes import check_labels
from langchain_dpicl.calls.flow import Flow, pause, run
from langchain_dpicl.errors import (
    InvalidParameter,
    LocalModelError,
    ModelLost,
    ModelUnavailable,
    UnsafeConfigurationError,
)
from langchain_dpicl.local.models import reopen
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.once.steps import UNIT, Whole, bounded
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import limit
from langchain_dpicl.store.base import embedder_of

ScoreRow = list[float]
"""A text's log-probabilities of the labels, less their mean."""

PATIENCE = 600.0
"""Seconds that a fit waits for a model that no longer answers as at the start."""

_LONGEST_PAUSE = 60.0
_TRIES = 3  # of one text
_FAILURES = 2  # with good probes after them: then they are the text's own
_ASKED_AGAIN = 8
_REACH = 3.0  # spreads from the mean, beyond which scores are scaled to norm 1
_FARTHEST = 32.0  # spreads: what is farther counts as this far
_LEAST_SPREAD = 2.0**-10
BROKEN = "the model no longer answered as at the start"
_FACTS = {"model", "labels", "template", "share", "top_logprobs", "mean", "spread"}


class LabelScores:
    """The source of a text's label scores: a model, a template and labels. All of it is public.

    Parameters
    ----------
    llm
        A LangChain completion or chat model whose server returns log-probabilities. Its answer to a prompt must not
        depend on other prompts, not in the last bit: see the module's text.
    labels
        The words that are scored; they need not be the head's labels. Distinct first words score best.
    template
        The prompt, with ``{input}`` once; it should end where a label begins. Runs of white space in a text become one
        space.
    share
        The part of a feature vector's squared norm that scores may take. The rest is the embedding's.
    top_logprobs
        Alternatives to ask for. Default: 100 of the embedded model, else 20.

    Raises `InvalidParameter`.
    """

    def __init__(
        self,
        llm: BaseLanguageModel[Any],
        labels: Sequence[str],
        template: str = "Input: {input}\nLabel:",
        *,
        share: float = 0.3,
        top_logprobs: int | None = None,
    ) -> None:
        if not isinstance(template, str) or template.count("{input}") != 1:
            raise InvalidParameter("template", template, "a text with {input} once")
        if top_logprobs is None:
            top_logprobs = 100 if getattr(llm, "accepts_shared_prefix", False) else 20
        filled = partial(_filled, template)
        self.scorer = LabelScorer(llm, labels, prompt=filled, calibrate=False, top_logprobs=top_logprobs)
        self.labels = self.scorer.labels
        self.template = template
        self.share = checks.real("share", share, above=0.0, below=1.0)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide the scores of a text, for the head's file."""
        return {
            "model": embedder_of(self.scorer.llm),
            "labels": list(self.labels),
            "template": self.template,
            "share": self.share,
            "top_logprobs": self.scorer.top_logprobs,
        }

    def row(self, text: str, config: RunnableConfig | None = None) -> ScoreRow:
        """The scores of one text. Raises what the model raises."""
        return self._centred(self.scorer.scores({self.scorer.query_key: text}, config))

    async def arow(self, text: str, config: RunnableConfig | None = None) -> ScoreRow:
        """The same, asynchronously."""
        return self._centred(await self.scorer.ascores({self.scorer.query_key: text}, config))

    def _centred(self, found: Mapping[str, float]) -> ScoreRow:
        logs = [math.log(max(found[label], 1e-30)) for label in self.labels]
        middle = math.fsum(logs) / len(logs)
        if not math.isfinite(middle):
            raise ValueError("no log-probabilities")
        return [each - middle for each in logs]

    def rows(self, texts: Sequence[str], progress: bool, *probes: tuple[str, ScoreRow]) -> Flow[list[Any]]:
        """The scores of each text by a call of its own, made as a private call. In place of a row: how it failed.

        With ``probes``, public texts and their scores, each text is scored between two good probes: the first of them,
        and after a failure all. `BROKEN` is in place of a row if a probe was bad after its last call. Raises
        `ModelLost`.
        """
        from tqdm import tqdm

        ask = self._ask()
        found: list[Any] = []
        for text in tqdm(texts, desc="scoring", unit="text", disable=None if progress else True):
            scoring = self._between(ask, text, probes) if probes else ask(text)
            found.append((yield from scoring))
        return found

    def _between(
        self,
        ask: Callable[..., Flow[Any]],
        text: str,
        probes: Sequence[tuple[str, ScoreRow]],
    ) -> Flow[Any]:
        """A text's scores, with good probes before and after the call that gave them."""
        row: Any = BROKEN
        failures = 0
        for _ in range(_TRIES):
            row = yield from ask(text)
            has_failed = not isinstance(row, list)
            if (yield from self._is_good(ask, probes if has_failed else probes[:1])):
                failures += has_failed
                if not has_failed or failures == _FAILURES:
                    return row
            else:
                row = BROKEN
                yield from self._waited_for(ask, probes)
        return row

    def _is_good(
        self,
        ask: Callable[..., Flow[Any]],
        probes: Sequence[tuple[str, ScoreRow]],
        *patience: float,
    ) -> Flow[bool]:
        for text, start in probes:
            if (yield from ask(text, *patience)) != start:
                return False
        return True

    def _ask(self) -> Callable[..., Flow[Any]]:
        """A private call with one text, on a copy of the scorer, which gives its row or how it failed."""

        def row(values: dict[str, Any], config: RunnableConfig) -> ScoreRow:
            return self.row(values["text"], config)

        member = Pristine(boundary.seal(RunnableLambda(row)))
        seconds = limit(member, "auto", 1)

        def ask(text: str, patience: float | None = None) -> Flow[Any]:
            (found,) = yield boundary.private_calls(
                member,
                [({"text": text}, ())],
                max_concurrency=1,
                timeout=seconds,
                patience=patience,
                failed=type,
            )
            return found

        return ask

    def _waited_for(self, ask: Callable[..., Flow[Any]], probes: Sequence[tuple[str, ScoreRow]]) -> Flow[None]:
        """Open an embedded model anew, or wait for a server, until the probes' scores are those of the start."""
        until = time.monotonic() + PATIENCE
        seconds = 0.0
        while time.monotonic() <= until:
            yield pause(seconds)
            yield self._reopened
            if (yield from self._is_good(ask, probes, 0.0)):
                return
            seconds = min(max(1.0, 2 * seconds), _LONGEST_PAUSE)
        raise ModelLost

    def _reopened(self) -> None:
        with contextlib.suppress(LocalModelError):
            reopen(self.scorer.llm)

    def calibrated(self, texts: Sequence[str], progress: bool = True) -> CalibratedScores:
        """These scores with their mean and spread over public texts.

        Raises `ModelUnavailable` if a text cannot be scored, `UnsafeConfigurationError` if a text's scores depend on
        the texts before it, and `InvalidParameter` if the scores are the same for all texts.
        """
        found = run(self.rows(texts, progress))
        for number, row in enumerate(found):
            if not isinstance(row, list):
                kind = f"{row.__module__}.{row.__qualname__}" if isinstance(row, type) else "it took too long"
                raise ModelUnavailable(f"no label scores for public text {number} ({kind}); nothing was charged")
        again = min(_ASKED_AGAIN, len(texts))
        if run(self.rows(texts[:again][::-1], False)) != found[:again][::-1]:
            raise UnsafeConfigurationError(
                f"{embedder_of(self.scorer.llm)} gives a text other log-probabilities after other texts: then one "
                "owner's records would move another's features. Use a server that answers one request at a time, from "
                "an empty cache, as local_llm does; nothing was charged"
            )
        # The spread is sqrt(E |s - mean|^2), over the public texts.
        mean = [math.fsum(column) / len(found) for column in zip(*found, strict=True)]
        squares = [(each - middle) ** 2 for row in found for each, middle in zip(row, mean, strict=True)]
        spread = math.sqrt(math.fsum(squares) / len(found))
        if spread < _LEAST_SPREAD:
            raise InvalidParameter(
                "scores",
                f"a spread of {spread:g}",
                "scores that differ among the public texts",
            )
        tells = [i for i in range(again) if max(found[i]) > min(found[i])] or range(again)
        shortest = min(tells, key=lambda i: len(texts[i]))
        others = [i for i in range(again) if i != shortest]
        longest = max(others, key=lambda i: len(texts[i]), default=shortest)
        probes = [(texts[i], found[i]) for i in (shortest, longest)]
        return CalibratedScores(self, mean, spread, *probes)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    return template.replace("{input}", " ".join(values["input"].split()))


@dataclass(frozen=True, eq=False)
class CalibratedScores:
    """Label scores with their ``mean`` and ``spread`` over public texts: features of norm at most 1. Public.

    ``probe`` and ``longest``: two of the public texts and their scores, if these were made in this process.
    """

    scores: LabelScores
    mean: list[float]
    spread: float
    probe: tuple[str, ScoreRow] | None = None
    longest: tuple[str, ScoreRow] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For the head's file, from which `read` makes an equal object."""
        return {**self.scores.facts, "mean": self.mean, "spread": self.spread}

    @staticmethod
    def checked(facts: Mapping[str, Any]) -> dict[str, Any]:
        """The facts in a head's file. Raises whatever it may if they are not those of scores."""
        found = {
            **facts,
            "model": str(facts["model"]),
            "mean": [checks.real("mean", each) for each in facts["mean"]],
            "spread": checks.real("spread", facts["spread"], at_least=_LEAST_SPREAD),
        }
        check_labels("labels", found["labels"])
        if set(found) != _FACTS or len(found["mean"]) != len(found["labels"]):
            raise ValueError("other facts")
        return found

    @classmethod
    def read(cls, facts: dict[str, Any], llm: BaseLanguageModel[Any] | None) -> CalibratedScores:
        """From `checked` facts. Raises `InvalidParameter` for another model, by its name, or for none."""
        named = None if llm is None else embedder_of(llm)
        if llm is None or named != facts["model"]:
            raise InvalidParameter("llm", named, f"{facts['model']}, whose label scores the head looks at")
        settings = {name: facts[name] for name in ("labels", "template", "share", "top_logprobs")}
        return cls(LabelScores(llm, **settings), facts["mean"], facts["spread"])

    @property
    def size(self) -> int:
        """The number of features."""
        return len(self.mean)

    def rows(self, texts: Sequence[str], progress: bool) -> Flow[list[Any]]:
        """`LabelScores.rows` of private texts, each between two good probes."""
        return self.scores.rows(
            texts,
            progress,
            *(each for each in (self.probe, self.longest) if each is not None),
        )

    def features(self, rows: Sequence[Any]) -> Whole:
        """Features of norm at most 1 in the units of `FeatureMap.features`. Zero for what is no `ScoreRow`.

        A score s gives (s - mean) / (3 spread), at most 32/3 either way. A row that is longer than 1 is scaled to 1.
        """
        unit = self.spread * _REACH / UNIT
        far = _FARTHEST / _REACH * UNIT
        found = np.zeros((len(rows), self.size))
        for place, row in enumerate(rows):
            if isinstance(row, list):
                found[place] = [
                    min(max((each - mean) / unit, -far), far) for each, mean in zip(row, self.mean, strict=True)
                ]
        return bounded(np.trunc(found), far * math.sqrt(self.size) + 1.0)

    def joined(self, features: Whole, rows: Sequence[Any]) -> Whole:
        """An embedding's features and these scores, of norm at most 1 together."""
        # As in `bounded`: the square of a row's norm is a whole number below 2^32 + 1.
        parts = (
            (features, 1.0 - self.scores.share),
            (self.features(rows), self.scores.share),
        )
        return np.concatenate([np.trunc(part * math.sqrt(share)) for part, share in parts], axis=1)

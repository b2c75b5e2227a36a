"""``dpicl answer`` for texts: the modes ``embedding``, ``keywords-joint`` and ``keywords-ptr``."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl import (
    DPAggregate,
    EmbeddingMean,
    Keywords,
    MembersAbstained,
    PrivacyBudget,
    PrivateEnsemble,
    local,
)
from langchain_dpicl.aggregators import Aggregator, ReleasedKeywords
from langchain_dpicl.cli.session import Session
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.downstream import keywords_to_answer
from langchain_dpicl.members.models import ModelChoice, Wording, read_lines
from langchain_dpicl.selection.selector import PoissonExampleSelector


@dataclass(kw_only=True)
class TextSession(Session):
    """Asks for texts: sentences, or keywords from which ``writer`` writes a text."""

    wording: Wording
    member: Runnable[Any, Any]
    writer: Runnable[Any, Any] | None

    def answer(self, text: str, compared: bool) -> dict[str, Any]:
        """Answer with a text. If the members abstain there is none, and no receipt."""
        more = {"zero_shot": self._zero_shot(text)} if compared else {}
        try:
            found = self.chain.invoke({self.input_key: text})
        except MembersAbstained:
            return {"private": None, "receipt": None, **more}
        if self.writer is None:
            return {"private": found["answer"], "receipt": found["receipt"], **more}
        words = found["answer"]
        query = {"asked": self.wording.asked, "field": self.wording.field(text)}
        given = ReleasedKeywords(words, ranked=words.ranked, fallback=words.fallback, query=query)
        try:
            written = str(self.writer.invoke(given))
        except Exception as error:  # the keywords are charged: a model that fails now must not lose them
            self.say(f"    no text was written: {type(error).__name__}")
            written = None
        return {"private": written, "receipt": found["receipt"], "keywords": list(words), **more}

    def try_answers(self, text: str) -> tuple[str | None, ...]:
        """Return the private and the zero-shot text."""
        return self.answer(text, False)["private"] or "", self._zero_shot(text)

    def scores(self) -> dict[str, Any]:
        """Compare the texts with the right answers."""
        from langchain_dpicl.evaluation.text import text_scores

        private, zero_shot, references = zip(*self.tested, strict=True)
        return {
            "scores": {"private": text_scores(private, references), "zero-shot": text_scores(zero_shot, references)}
        }

    def score_lines(self) -> list[str]:
        """One line for each way to answer."""
        return [
            f"{kind:20s} " + "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            for kind, values in self.scores()["scores"].items()
        ]

    def _zero_shot(self, text: str) -> str:
        return str(self.member.invoke({self.input_key: text, "examples": ""}))


def text_session(
    options: argparse.Namespace, budget: PrivacyBudget, selector: PoissonExampleSelector, choice: ModelChoice
) -> TextSession:
    """Make the session for ``--mode``."""

    def model(temperature: float) -> Any:
        return choice.load(max_tokens=options.max_tokens, temperature=temperature)

    wording = Wording(options.input_key, options.output_key, options.instruction)
    member, public = wording.member(model(0.0)), wording.member(model(0.9))
    aggregator = _aggregator(options, public)
    writer = None
    if isinstance(aggregator, Keywords):
        chain = model(0.0) | StrOutputParser() | wording.first_answer()
        writer = keywords_to_answer(chain, PromptTemplate.from_template("{asked}{suggestions}.\n\n{field}"))
    release = PrivateEnsemble(selector, member) | DPAggregate(aggregator, budget, return_receipt=True)
    return TextSession(release, options.input_key, options.json, wording=wording, member=member, writer=writer)


def _aggregator(options: argparse.Namespace, public: Runnable[Any, Any]) -> Aggregator[Any]:
    for name, mode in (("domain", "keywords-joint"), ("candidates", "embedding")):
        if getattr(options, name) is not None and options.mode != mode:
            raise InvalidParameter(f"--{name}", getattr(options, name), f"left out, or --mode {mode}")
    if options.mode == "embedding":
        if options.k is not None:
            raise InvalidParameter("--k", options.k, "left out unless keywords are released")
        candidates = read_lines("--candidates", options.candidates) if options.candidates else public
        return EmbeddingMean(local.local_embeddings(), candidates, options.n_candidates)
    form = r"\d{1,9}" if options.mode == "keywords-joint" else r"\d{1,9}(-\d{1,9})?"
    if options.k is not None and not re.fullmatch(form, options.k, re.ASCII):
        raise InvalidParameter("--k", options.k, "a whole number, or for keywords-ptr also a range such as 5-10")
    least, _, most = (options.k or "").partition("-")
    if options.mode == "keywords-joint":
        domain: Any = read_lines("--domain", options.domain) if options.domain else "query"
        return Keywords.joint_em(domain, int(least or 10))
    return Keywords.ptr((int(least), int(most or least)) if least else (15, 30))

"""``dpicl answer`` for texts: the modes ``embedding``, ``keywords-joint`` and ``keywords-ptr``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable
from tqdm import tqdm

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
from langchain_dpicl.cli.session import Question, Session, shortened
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.members.downstream import keywords_to_answer
from langchain_dpicl.members.models import Wording, read_lines
from langchain_dpicl.selection.selector import PoissonExampleSelector

MODES = ("embedding", "keywords-joint", "keywords-ptr")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of these modes."""
    texts = parser.add_argument_group("texts instead of labels")
    texts.add_argument("--instruction", help="what the model is asked to do, without a full stop")
    texts.add_argument("--k", help="how many keywords; for keywords-ptr also a range such as 5-10")
    texts.add_argument("--domain", help="a file with the words that keywords-joint may release (default: the question)")
    texts.add_argument("--candidates", help="a file with public sentences for embedding, one a line (default: written)")
    texts.add_argument("--n-candidates", type=int, default=20, help="zero-shot sentences to write (default 20)")
    texts.add_argument("--max-tokens", type=int, default=60, help="length of an answer (default 60)")


def run(
    options: argparse.Namespace,
    budget: PrivacyBudget,
    selector: PoissonExampleSelector,
    model: Callable[..., BaseLanguageModel[Any]],
    questions: Sequence[Question],
    tests: Sequence[dict[str, Any]],
) -> int:
    """Answer with texts."""
    known = _known(tests, options)[: options.limit]
    wording = _wording(options)
    member, writer = wording.member(model(temperature=0.0)), wording.member(model(temperature=0.9))
    aggregator = _aggregator(options, writer)
    release = PrivateEnsemble(selector, member) | DPAggregate(aggregator, budget, return_receipt=True)
    session = TextSession(release, options.input_key, options.json, options=options, member=member)
    if isinstance(aggregator, Keywords):
        answer = model(temperature=0.0) | StrOutputParser() | wording.first_answer()
        session.write = keywords_to_answer(answer, PromptTemplate.from_template("{asked}{suggestions}.\n\n{field}"))
    line = release.line()
    session.say(f"{selector.store!r}; {budget!r}")
    session.say(f"each answer: {options.members} calls, rate {line.rate:.4g}; released: {line.plan_line.describe()}")
    session.ask(questions, compared=options.compare)
    session.test(known)
    return session.finish(epsilon=budget.epsilon, delta=budget.delta, rate=line.rate, parameter=line.parameter)


def _aggregator(options: argparse.Namespace, writer: Runnable[Any, Any]) -> Aggregator[Any]:
    for name, mode in (("domain", "keywords-joint"), ("candidates", "embedding")):
        if getattr(options, name) is not None and options.mode != mode:
            raise InvalidParameter(f"--{name}", getattr(options, name), f"left out, or --mode {mode}")
    if options.mode == "embedding":
        if options.k is not None:
            raise InvalidParameter("--k", options.k, "left out where no keywords are released")
        candidates = read_lines("--candidates", options.candidates) if options.candidates else writer
        return EmbeddingMean(local.local_embeddings(), candidates, options.n_candidates)
    form = r"\d{1,9}" if options.mode == "keywords-joint" else r"\d{1,9}(-\d{1,9})?"
    if options.k is not None and not re.fullmatch(form, options.k, re.ASCII):
        raise InvalidParameter("--k", options.k, "a whole number, or for keywords-ptr also a range such as 5-10")
    least, _, most = (options.k or "").partition("-")
    if options.mode == "keywords-joint":
        domain: Any = read_lines("--domain", options.domain) if options.domain else "query"
        return Keywords.joint_em(domain, int(least or 10))
    return Keywords.ptr((int(least), int(most or least)) if least else (15, 30))


def _wording(options: argparse.Namespace) -> Wording:
    return Wording(options.input_key, options.output_key, options.instruction)


def _known(records: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Question]:
    found = []
    for i, record in enumerate(records):
        text, answer = record.get(options.input_key), record.get(options.output_key)
        if not isinstance(text, str) or not isinstance(answer, str):
            raise InvalidRecords(f"test record {i} needs texts under {options.input_key!r} and {options.output_key!r}")
        found.append(Question(text, answer))
    return found


@dataclass
class TextSession(Session):
    """Asks, prints and scores texts."""

    options: argparse.Namespace | None = None
    member: Runnable[Any, Any] | None = None
    write: Runnable[Any, Any] | None = None  # from released keywords to a text
    written: list[tuple[str, str, str]] = field(default_factory=list)  # private, zero-shot, reference

    def _entry(self, question: Question) -> dict[str, Any]:
        try:
            found = self.chain.invoke({self.input_key: question.text})
        except MembersAbstained:
            return {"question": question.text, "private": None, "receipt": None}
        entry = {"question": question.text, "private": found["answer"], "receipt": found["receipt"]}
        if self.write is not None:
            entry |= {"private": self._written(question, found["answer"]), "keywords": list(found["answer"])}
        return entry

    def _written(self, question: Question, words: ReleasedKeywords) -> str | None:
        """A text from the keywords. They are released and charged: a model that fails now must not lose them."""
        assert self.options is not None
        assert self.write is not None
        wording = _wording(self.options)
        query = {"asked": wording.asked, "field": wording.field(question.text)}
        try:
            return str(
                self.write.invoke(ReleasedKeywords(words, ranked=words.ranked, fallback=words.fallback, query=query))
            )
        except Exception as error:
            self.say(f"    no text was written: {type(error).__name__}")
            return None

    def _zero_shot(self, question: Question) -> str:
        assert self.member is not None
        return str(self.member.invoke({self.input_key: question.text, "examples": ""}))

    def _ask(self, questions: Sequence[Question], compared: bool) -> None:
        for question in questions:
            entry = self._entry(question) | ({"zero_shot": self._zero_shot(question)} if compared else {})
            self.asked.append(entry)
            self.say(f"\n  {shortened(question.text)}")
            nothing = "-" if entry["receipt"] else "(the members abstain)"
            self.say(f"    private answer       {entry['private'] or nothing}")
            if entry.get("keywords"):
                self.say(f"    released keywords    {', '.join(entry['keywords'])}")
            if compared:
                self.say(f"    zero-shot            {entry['zero_shot']}")
            if entry["receipt"] is not None:
                if entry["receipt"]["outcome"] != "released":
                    self.say(f"    released             nothing: {entry['receipt']['outcome']}")
                self.say_receipt(entry["receipt"])

    def _test(self, questions: Sequence[Question]) -> None:
        for question in tqdm(questions, desc="held-out", unit="question", disable=None, file=sys.stderr):
            private = self._entry(question)["private"] or ""
            self.written.append((private, self._zero_shot(question), question.expected or ""))
        self.say()
        for kind, values in self.scores()["scores"].items():
            self.say(f"    {kind:20s} " + "  ".join(f"{name} {value:.3f}" for name, value in values.items()))

    def scores(self) -> dict[str, Any]:
        if not self.written:
            return {}
        from langchain_dpicl.evaluation.text import text_scores

        private, zero_shot, references = zip(*self.written, strict=True)
        kinds = {"private": private, "zero-shot": zero_shot}
        return {"scores": {k: text_scores(v, references) for k, v in kinds.items()}, "held_out": len(self.written)}

"""``dpicl answer`` for texts: the modes ``embedding``, ``keywords-joint`` and ``keywords-ptr``."""

from __future__ import annotations

import argparse
import re
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import DPAggregate, PrivacyBudget, PrivateEnsemble, local
from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, ReleasedKeywords
from langchain_dpicl.cli.session import Session
from langchain_dpicl.errors import InvalidParameter, MembersAbstained
from langchain_dpicl.members.chains import ModelChoice, Wording, keywords_to_answer, read_lines
from langchain_dpicl.selection import PoissonExampleSelector


def text_session(
    options: argparse.Namespace, budget: PrivacyBudget, selector: PoissonExampleSelector, choice: ModelChoice
) -> Session:
    """Ask for sentences, or for keywords from which a model writes a text.

    Raises `InvalidParameter` for an option of another mode.
    """
    from langchain_dpicl.evaluation.tasks import text_scores

    for name, mode in (("domain", "keywords-joint"), ("candidates", "embedding")):
        if getattr(options, name) is not None and options.mode != mode:
            raise InvalidParameter(f"--{name}", getattr(options, name), f"left out, or --mode {mode}")
    if options.k is not None and options.mode == "embedding":
        raise InvalidParameter("--k", options.k, "left out unless keywords are released")
    form = r"\d{1,9}" if options.mode == "keywords-joint" else r"\d{1,9}(-\d{1,9})?"
    if options.k is not None and not re.fullmatch(form, options.k, re.ASCII):
        raise InvalidParameter("--k", options.k, "a whole number, or for keywords-ptr also a range such as 5-10")
    least, _, most = (options.k or "").partition("-")

    def model(temperature: float) -> Any:
        return choice.load(max_tokens=options.max_tokens, temperature=temperature)

    wording = Wording(options.input_key, options.output_key, options.instruction)
    member, writer = wording.member(model(0.0)), None
    if options.mode == "embedding":
        public = read_lines("--candidates", options.candidates) if options.candidates else wording.member(model(0.9))
        aggregator: Aggregator[Any] = EmbeddingMean(local.local_embeddings(), public, options.n_candidates)
    else:
        if options.mode == "keywords-joint":
            domain = read_lines("--domain", options.domain) if options.domain else "query"
            aggregator = Keywords.joint_em(domain, int(least or 10))
        else:
            aggregator = Keywords.ptr((int(least), int(most or least)) if least else (15, 30))
        chain = model(0.0) | StrOutputParser() | wording.first_answer()
        writer = keywords_to_answer(chain, PromptTemplate.from_template("{asked}{suggestions}.\n\n{field}"))
    release = PrivateEnsemble(selector, member) | DPAggregate(aggregator, budget, return_receipt=True)

    def answer(text: str, compared: bool) -> dict[str, Any]:
        """If the members abstain there is no text, and no receipt."""
        asked = {options.input_key: text}
        more: dict[str, Any] = {"zero_shot": str(member.invoke({**asked, "examples": ""}))} if compared else {}
        try:
            found = release.invoke(asked)
        except MembersAbstained:
            return {"private": None, "receipt": None, **more}
        words = written = found["answer"]
        if writer is not None:
            more["keywords"] = list(words)
            query = {"asked": wording.asked, "field": wording.field(text)}
            try:
                given = ReleasedKeywords(words, ranked=words.ranked, fallback=words.fallback, query=query)
                written = str(writer.invoke(given))
            except Exception as error:  # the keywords are charged: a model that fails now must not lose them
                session.say(f"    no text was written: {type(error).__name__}")
                written = None
        return {"private": written, "receipt": found["receipt"], **more}

    def score(given: list[Any], right: list[str]) -> dict[str, float]:
        return text_scores([text or "" for text in given], right)

    session = Session(release, options, answer, score)
    return session

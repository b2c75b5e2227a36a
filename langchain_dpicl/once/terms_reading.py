"""The reading of texts for terms: which terms a text has, and which of them its owner gives.

**A text by itself.** Its terms are a function of this text and of public settings.

**An owner's terms.** An owner gives at most so many: those that most of its texts have, ties by its own coins. No other
owner has a part in this: no frequency in the store, no list made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from langchain_dpicl.aggregators import Words
from langchain_dpicl.once.tables_reading import folded
from langchain_dpicl.privacy.noise import Randomness

LONGEST = 200
"""The most characters of a term."""

MOST_WORDS = 3
"""The most words of a phrase."""

TokenKeys = dict[str, tuple[str, ...]]
"""The keys of tokens that were read before, for one reading. Private."""

_MOST_KNOWN = 1 << 20


def term_of(text: str) -> str:
    """A text as a term: its words without case and accents, and single spaces between."""
    return " ".join(folded(text))


class WholeTexts:
    """A text is one term, or none if it is longer than `LONGEST` or has no word."""

    facts = "whole"

    def terms(self, text: str, known: TokenKeys) -> set[str]:
        """The term of a text. Private."""
        term = term_of(text)
        return {term} if 0 < len(term) <= LONGEST else set()


class WordsAndPhrases:
    """The words of a text by ``words``, and its phrases of up to so many words, all without case and accents.

    A phrase stands in the text as it is, without regard to punctuation, and begins and ends with a word that ``words``
    keeps: "bank of england".
    """

    def __init__(self, words: Words, phrases: int) -> None:
        self._words = words
        self._phrases = phrases
        self.facts = ["words", repr(words), phrases]

    def terms(self, text: str, known: TokenKeys) -> set[str]:
        """The different terms of a text. ``known`` makes many texts faster, and is to go with them. Private."""
        tokens: list[str] = []
        kept: list[bool] = []
        for token in folded(text):
            keys = self._keys(token, known)
            tokens += keys or (token,)
            kept += [bool(keys)] * max(1, len(keys))
        found = set[str]()
        for first in [place for place, is_word in enumerate(kept) if is_word]:
            for end in range(first + 1, min(first + self._phrases, len(tokens)) + 1):
                if kept[end - 1]:
                    found.add(" ".join(tokens[first:end]))
        return {term for term in found if len(term) <= LONGEST}

    def _keys(self, token: str, known: TokenKeys) -> tuple[str, ...]:
        """The keys of a token's words, such as their stems; none of a stop word, or if ``words`` fails on it."""
        found = known.get(token)
        if found is not None:
            return found
        try:
            keys = [term_of(self._words.key(word)) for word in self._words(token)]
        except Exception:  # of a tokenizer
            keys = []
        found = tuple(key for key in keys if key)
        if len(known) < _MOST_KNOWN:
            known[token] = found
        return found


TermReader = WholeTexts | WordsAndPhrases


def given_terms(texts: Iterable[set[str]], at_most: int, randomness: Randomness) -> list[str]:
    """The terms that an owner of these texts gives: those that most of its texts have, ties by its own coins. Private.

    ``texts`` has each text's different terms.
    """
    counts = Counter(term for terms in texts for term in terms)
    if len(counts) <= at_most:
        return list(counts)
    coins = randomness.uniforms(len(counts)).tolist()
    ranked = sorted(zip(counts.items(), coins, strict=True), key=lambda each: (-each[0][1], each[1]))
    return [term for (term, _), _ in ranked[:at_most]]

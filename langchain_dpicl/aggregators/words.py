"""How a text becomes words: public settings, applied alike to every text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from langchain_dpicl.errors import InvalidParameter

ENGLISH_STOP_WORDS = frozenset(
    """
    a about above across after afterwards again against all almost alone along already also although always am
    among amongst amoungst amount an and another any anyhow anyone anything anyway anywhere are around as at
    back be became because become becomes becoming been before beforehand behind being below beside besides
    between beyond bill both bottom but by call can cannot cant co con could couldnt cry de describe detail do
    done down due during each eg eight either eleven else elsewhere empty enough etc even ever every everyone
    everything everywhere except few fifteen fifty fill find fire first five for former formerly forty found
    four from front full further get give go had has hasnt have he hence her here hereafter hereby herein
    hereupon hers herself him himself his how however hundred i ie if in inc indeed interest into is it its
    itself keep last latter latterly least less ltd made many may me meanwhile might mill mine more moreover
    most mostly move much must my myself name namely neither never nevertheless next nine no nobody none noone
    nor not nothing now nowhere of off often on once one only onto or other others otherwise our ours ourselves
    out over own part per perhaps please put rather re same see seem seemed seeming seems serious several she
    should show side since sincere six sixty so some somehow someone something sometime sometimes somewhere
    still such system take ten than that the their them themselves then thence there thereafter thereby
    therefore therein thereupon these they thick thin third this those though three through throughout thru thus
    to together too top toward towards twelve twenty two un under until up upon us very via was we well were
    what whatever when whence whenever where whereafter whereas whereby wherein whereupon wherever whether which
    while whither who whoever whole whom whose why will with within without would yet you your yours yourself
    yourselves
    """.split()
)
"""The list of the Glasgow Information Retrieval Group, as scikit-learn distributes it (BSD 3-Clause licence)."""


class Words:
    """The different words of a text, in order of first appearance.

    Parameters
    ----------
    lowercase
        Whether "Asthma" and "asthma" are one word.
    stop_words
        Words to leave out: "english" (`ENGLISH_STOP_WORDS`), a list of your own, or None.
    stem
        The language of a Snowball stemmer ("english", "german", ...), which makes "coughs" and "coughing" one word;
        None for none. If the words come from a public list, its own spelling is released, else the stem.
    pattern
        What counts as a word: a regular expression with at most one group. Default: two or more letters or digits.
    tokenizer
        A function from a text to its words, instead of ``pattern``.
    """

    def __init__(
        self,
        *,
        lowercase: bool = True,
        stop_words: str | Iterable[str] | None = "english",
        stem: str | None = None,
        pattern: str = r"(?u)\b\w\w+\b",
        tokenizer: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.lowercase = bool(lowercase)
        if not (stop_words is None or isinstance(stop_words, (str, Iterable))):
            raise InvalidParameter("stop_words", stop_words, '"english", a list of words, or None')
        self.stop_words = stop_words if stop_words is None or isinstance(stop_words, str) else tuple(stop_words)
        self.stem = stem
        self.pattern = pattern
        self.tokenizer = tokenizer
        self._stemmed = _stemmer(stem)
        try:
            self._tokens = re.compile(pattern).findall if tokenizer is None else tokenizer
            if tokenizer is None and re.compile(pattern).groups > 1:
                raise ValueError("the pattern has more than one capturing group")
            if isinstance(self.stop_words, str) and self.stop_words != "english":
                raise ValueError(f"not a built-in stop list: {self.stop_words}")
            english = self.stop_words == "english"
            self._left_out = ENGLISH_STOP_WORDS if english else frozenset(self.stop_words or ())
            self._split("two words")
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidParameter("words", self, f"settings that can split a text ({reason})")

    def __call__(self, text: str) -> list[str]:
        return [word for word in dict.fromkeys(self._split(text)) if word]

    def key(self, word: str) -> str:
        """What the spellings of one word have in common: itself, or its stem."""
        return self._stemmed(word)

    def keys(self, text: str) -> frozenset[str]:
        """The keys of a text's words: each counts once."""
        return frozenset(str.__str__(key) for key in map(self._stemmed, set(self._split(text))) if key)

    def _split(self, text: str) -> list[str]:
        tokens = self._tokens(text.lower() if self.lowercase else text)
        return [token for token in tokens if token not in self._left_out]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("lowercase", "stop_words", "stem"))
        if self.tokenizer is None:
            return f"Words({shown}, pattern={self.pattern!r})"
        # A name that tells functions apart: in this process alone if the function has none of its own.
        kind = self.tokenizer if hasattr(self.tokenizer, "__qualname__") else type(self.tokenizer)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"Words({shown}, tokenizer={name}{f'@{id(self.tokenizer):x}' if '<' in name else ''})"


def _stemmer(language: str | None) -> Callable[[str], str]:
    if language is None:
        return str
    import snowballstemmer

    if language not in snowballstemmer.algorithms():
        raise InvalidParameter("stem", language, f"None or one of {', '.join(snowballstemmer.algorithms())}")

    def stem(word: str) -> str:
        return str(snowballstemmer.stemmer(language).stemWord(word))  # a stemmer holds state: one for each call

    return stem

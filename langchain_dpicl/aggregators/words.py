"""How a text becomes words: public settings, carried out by scikit-learn and Snowball."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from langchain_dpicl.errors import InvalidParameter


class Words:
    """The different words of a text, in order of first appearance.

    Parameters
    ----------
    lowercase
        Whether "Asthma" and "asthma" are one word.
    stop_words
        Words to leave out: "english" (scikit-learn's list), a list of your own, or None.
    stem
        The language of a Snowball stemmer ("english", "german", ...), which makes "coughs" and "coughing" one word;
        None for none. Where the words come from a public list, its own spelling is released, else the stem.
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
        self._split = self._splitter()
        self._stemmed = _stemmer(stem)

    def __call__(self, text: str) -> list[str]:
        return [word for word in dict.fromkeys(self._split(text)) if word]

    def key(self, word: str) -> str:
        """What the spellings of one word have in common: itself, or its stem."""
        return self._stemmed(word)

    def keys(self, text: str) -> frozenset[str]:
        """The keys of a text's words: each counts once."""
        return frozenset(str.__str__(key) for key in map(self._stemmed, set(self._split(text))) if key)

    def _splitter(self) -> Callable[[str], list[str]]:
        from sklearn.feature_extraction.text import CountVectorizer

        listed = list(self.stop_words) if isinstance(self.stop_words, tuple) else self.stop_words
        try:
            split: Callable[[str], list[str]] = CountVectorizer(
                lowercase=self.lowercase,
                stop_words=listed,
                token_pattern=None if self.tokenizer else self.pattern,
                tokenizer=self.tokenizer,
            ).build_analyzer()
            list(split("two words"))
            return split
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidParameter("words", self, f"settings that scikit-learn accepts ({reason})")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("lowercase", "stop_words", "stem"))
        split = f"pattern={self.pattern!r}" if self.tokenizer is None else f"tokenizer={_name(self.tokenizer)}"
        return f"Words({shown}, {split})"


def _name(function: Callable[..., object]) -> str:
    """A name that tells functions apart: in this process alone where the function has none of its own."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}@{id(function):x}" if "<" in name else name


def _stemmer(language: str | None) -> Callable[[str], str]:
    if language is None:
        return str
    import snowballstemmer

    if language not in snowballstemmer.algorithms():
        raise InvalidParameter("stem", language, f"None or one of {', '.join(snowballstemmer.algorithms())}")

    def stem(word: str) -> str:
        return str(snowballstemmer.stemmer(language).stemWord(word))  # a stemmer holds state: one for each call

    return stem

"""The interface of aggregators: N outputs in, one release out. And how a text is read as words."""

from __future__ import annotations

import copy
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, Generic, Literal, Self

from langchain_core.runnables import Runnable
from typing_extensions import TypeVar

from langchain_dpicl.aggregators.reading import plain, text_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.choice import Crowd, options_of
from langchain_dpicl.privacy.lines import family_of
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.noise import Randomness

T = TypeVar("T", default=Any)
"""What an aggregator releases."""

Outcome = Literal["released", "zero-shot fallback", "members abstained"]
MembersTask = Literal["write", "choose", "none"]


@dataclass(frozen=True)
class WorstCase:
    """Answers for which one owner's presence shows most in a release: what `dpicl audit` attacks a kind with.

    The owner's member answers ``canary`` if the owner takes part, else ``base``; with a call for every owner there is
    no such answer then. The other members answer ``others``. ``aggregator`` has a small public domain.
    """

    words: str
    aggregator: Aggregator[Any]
    base: str
    canary: str
    others: tuple[str, ...]


class Aggregator(ABC, Generic[T]):
    """A mechanism on the members' outputs.

    Its promise is the privacy profile of ``mechanism`` (a family in `langchain_dpicl.privacy.MECHANISMS`) at the plan's
    parameter, valid when one member's output is replaced by any other or by an abstention. If it ``takes_own_calls``,
    also when it is replaced by nothing (an empty bucket counts nothing), and the profile of the option ``own_calls``
    holds when one output is added or removed: the number of outputs is then private, and what is public about it stands
    in ``crowd``, which `under` sets before a release.

    One release takes three steps. `prepare` settles what depends on the query alone, before anything is charged.
    `encode` reads ONE member's output, within that member's own call, so that whatever it does, or raises, depends on
    this output and touches no other. `aggregate` is the mechanism; it gets what `encode` made, and looks at no output.

    A kind of release is a class with a `kind`. Files and the command line offer it by this name, with the parameters of
    its `constructor`, in the words of its docstring. What cannot be read off those, the class says: `task`,
    `max_tokens`, `asked`, `outputs`, `hit`, `worst_cases`.
    """

    kind: ClassVar[str]
    """The name of this kind of release, in `KINDS`, in files and on the command line."""
    task: ClassVar[MembersTask] = "write"
    """Work of the members: write a text, or choose one of the labels. "none": there are no members."""
    max_tokens: ClassVar[int] = 60
    """The usual limit of what a member writes."""
    gives_text: ClassVar[bool] = False
    """Whether a release is a text (or words to write one from), which is compared with a right one by likeness."""

    mechanism: str
    crowd: Crowd | None = None
    """The public numbers of a release's outputs."""
    takes_own_calls: bool = False
    """Whether any number of outputs, which is private, may come to `aggregate`; and each may be of one owner, so that
    an owner more or less is one output more or less. Otherwise N come, and an empty bucket's is an abstention."""

    SAMPLES = ("a made-up answer", "another made-up answer")

    tells_abstention: bool = True
    """Whether a release shows that the members fail. If it does not, the ensemble asks a public question first."""

    @classmethod
    def constructor(cls) -> Callable[..., Any]:
        """Return what makes one of its public parameters: the class, unless users call something else."""
        return cls

    @classmethod
    def worst_cases(cls) -> Sequence[WorstCase]:
        """Return cases for an audit, one of them with all others equal to its base; it attacks with the most telling.

        The kinds whose cases depend on the noise have theirs in the lab.
        """
        return ()

    def asked(self, usual: str) -> str:
        """Return the instruction for members, without a full stop. ``usual``: such as "Write the note for the text"."""
        return usual

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The form that examples' outputs must have: ``label_of`` and ``unread`` of `store.datacheck.check_file`."""
        return {}

    def hit(self, release: T, right: object) -> float:
        """Return how right a release is, from 0 to 1, if ``right`` is the output of an example."""
        return float(release == self.zero_shot(right, {}))

    def majority(self, outputs: Sequence[object]) -> T | None:
        """PRIVATE: what most encoded outputs say, without noise. None if that has no meaning for the kind."""
        return None

    def tells(self, members: int, parameter: float) -> bool:
        """Return True if a release of so many members at this noise shows that they fail: from public numbers."""
        return self.tells_abstention

    @property
    def choices(self) -> tuple[str, ...]:
        """The mechanisms among which a plan may choose."""
        return (self.mechanism,)

    def under(self, mechanism: str, crowd: Crowd) -> Self:
        """The aggregator under a plan's line, for a crowd."""
        bound = copy.copy(self)
        bound.mechanism = mechanism
        bound.crowd = crowd
        return bound

    def _crowd(self, outputs: Sequence[object]) -> Crowd:
        """The public numbers. Without `under` the number of outputs is one, as in shared buckets that all count."""
        return self.crowd or Crowd(len(outputs), len(outputs))

    @property
    def _own_calls(self) -> bool:
        """True if every output is of one owner. Without `under` the buckets are shared."""
        return self.crowd is not None and self.crowd.own_calls

    @property
    def _counted(self) -> int | None:
        """The number of outputs that are expected to count, rounded down; None without `under`."""
        return None if self.crowd is None else math.floor(self.crowd.expected)

    @property
    def options(self) -> Options:
        """The fixed public numbers of the mechanism, which the plan freezes."""
        return {}

    @property
    def outcomes(self) -> int | None:
        """Between how many outcomes a release chooses; None if it is of another form."""
        return None

    def overturned(self, parameter: float) -> float | None:
        """The chance that noise overturns an answer on which all expected outputs agree; None if it has no meaning."""
        if self.crowd is None or self.outcomes is None:
            return None
        family = family_of(self.mechanism).of({**self.options, **options_of(self.crowd)})
        return family.flip(parameter, math.floor(self.crowd.expected), self.outcomes)

    def public_calls(self) -> tuple[Runnable[Any, Any] | None, int] | None:
        """The zero-shot calls whose answers `prepare` gets: a chain (None: the member) and their number.

        They see the query and no private example.
        """
        return None

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        """The aggregator for one query: ``values`` as the caller gave them, the plan's ``options``, the zero-shot
        ``answers``. All of it is public, and an error costs nothing."""
        return self

    @property
    def samples(self) -> Sequence[str]:
        """Public texts that `encode` can read: what the made-up examples of a public question have as their outputs."""
        return self.SAMPLES

    def check_kind(self, output: object) -> None:
        """Raise if a public output is of a kind that cannot be read, whatever it says."""
        if text_of(output) is None:
            self.check_encoded(self.encode(output))

    def check_encoded(self, encoded: object) -> None:
        """Raise `ValueError` if what `encode` made of a public output adds nothing to a release."""

    def encode(self, output: object) -> object:
        """Return what `aggregate` needs of one member's output. Raising makes this member abstain.

        Raise for whatever cannot be read: a public question tells by it, before the charge, that the members' answers
        would be of no use. Return plain numbers, texts and arrays that are made here: an output is any object at all,
        whose methods may raise, and in `aggregate` they would fail the release for all.
        """
        return output

    async def aencode(self, output: object) -> object:
        """`encode`, asynchronously."""
        return self.encode(output)

    def shown(self, encoded: object) -> object:
        """Return what `encode` made of a public output, for people: a rehearsal shows it."""
        return encoded

    @abstractmethod
    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> T | None:
        """One release, or None if the release is that the members abstain.

        ``outputs`` holds what `encode` made of each member's output, `ABSTAIN` for a failed one; ``parameter`` is the
        plan's noise. Nothing that an output holds may make this raise.
        """

    def outcome(self, release: T | None) -> Outcome:
        """The kind of this release, for the receipt."""
        return "members abstained" if release is None else "released"

    @property
    def variant(self) -> str:
        """All public settings that decide what a release looks like: answers are replayed between equal ones alone."""
        return repr(self)

    def dump(self, release: T) -> str:
        """A release as JSON text, from which `load` makes an equal one."""
        return json.dumps(release)

    def load(self, text: str, values: Mapping[str, Any]) -> T:
        """The release that `dump` wrote, as the answer to a query."""
        release: T = json.loads(text)
        return release

    @abstractmethod
    def zero_shot(self, output: object, values: Mapping[str, Any]) -> T | None:
        """A public answer in the form of a release, from the member's output without examples; None if there is none.

        It stands in when the budget is spent, if the deployer asked for that.
        """

    @property
    @abstractmethod
    def release_type(self) -> Any:
        """The Python type of a release, for the Runnable's schema."""


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

    Accents are composed (NFC) first, and invisible characters (zero-width spaces, soft hyphens) left out.

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
        if not (stop_words is None or isinstance(stop_words, (str, Iterable))):
            raise InvalidParameter("stop_words", stop_words, '"english", a list of words, or None')
        self.lowercase = bool(lowercase)
        self.stem = stem
        self.pattern = pattern
        self.tokenizer = tokenizer
        self.stop_words = stop_words if stop_words is None or isinstance(stop_words, str) else tuple(stop_words)
        self._stemmed = _stemmer(stem)
        try:
            if tokenizer is None and re.compile(pattern).groups > 1:
                raise ValueError("the pattern has more than one capturing group")
            if isinstance(self.stop_words, str) and self.stop_words != "english":
                raise ValueError(f"not a built-in stop list: {self.stop_words}")
            self._tokens = re.compile(pattern).findall if tokenizer is None else tokenizer
            left_out = ENGLISH_STOP_WORDS if self.stop_words == "english" else frozenset(self.stop_words or ())
            self._left_out = frozenset(map(plain, left_out))
            self._split("two words")
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidParameter("words", self, f"settings that can split a text ({reason})")

    def __call__(self, text: str) -> list[str]:
        return [word for word in dict.fromkeys(self._split(text)) if word]

    def key(self, word: str) -> str:
        """Return what the spellings of one word have in common: itself, or its stem."""
        return self._stemmed(word)

    def keys(self, text: str) -> frozenset[str]:
        """The keys of a text's words: each counts once."""
        return frozenset(str.__str__(key) for key in map(self._stemmed, set(self._split(text))) if key)

    def _split(self, text: str) -> list[str]:
        text = plain(text)
        tokens = self._tokens(plain(text.lower()) if self.lowercase else text)
        return [token for token in tokens if token not in self._left_out]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("lowercase", "stop_words", "stem"))
        if self.tokenizer is None:
            return f"Words({shown}, pattern={self.pattern!r})"
        return f"Words({shown}, tokenizer={name_of(self.tokenizer)})"


def name_of(function: object) -> str:
    """A name that tells functions apart: in this process alone if it is one of an object's, or has no name."""
    kind = function if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else type(function)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if kind is function and "<" not in name else f"{name}@{id(function):x}"


def _stemmer(language: str | None) -> Callable[[str], str]:
    if language is None:
        return str
    import snowballstemmer

    if language not in snowballstemmer.algorithms():
        raise InvalidParameter("stem", language, f"None or one of {', '.join(snowballstemmer.algorithms())}")

    def stem(word: str) -> str:
        return str(snowballstemmer.stemmer(language).stemWord(word))  # a stemmer holds state: one for each call

    return stem

"""One pass of a model: a task's rows, the samples that a plan draws from them, and the model's answers on disk.

A stopped evaluation resumes from these answers. They are members' answers in the open: for data that are public in
truth, or stay with their owner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import FakeEmbeddings
from langchain_core.runnables import Runnable

from langchain_dpicl.durable import LineFile
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.privacy.choice import Crowd, options_of
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

# -- the model's answers -----------------------------------------------------------------------------------------------


# Examples of one prompt: (input, output).
Pairs = Sequence[tuple[str, str]]

Key = tuple[int | str, ...]


class PassFile(dict[Key, Any], LineFile):
    """Entries by key, on disk from the moment they are added (with `add` or `answers`).

    The first line holds the settings; each further line is one entry as JSON. A line that a stop left half written is
    dropped, and its work is done again. Only the file's owner may read it.

    Raises `InvalidParameter` if the file was made with other settings (it names the first that differs), is no such
    file, is damaged (it names the line), cannot be written, or if another evaluation has it. A refused file stays as
    it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        LineFile.__init__(self, path, path, "a folder", "evaluation", private=True)
        head = json.dumps(self.settings, sort_keys=True)
        try:
            asked = json.loads(head)
            found = _parsed(self.lines[0]) if self.lines else asked
            if not isinstance(found, dict) or not (self.lines or head.encode().startswith(self.torn)):
                raise self.refused("a folder of an evaluation: its first line is damaged")
            for name in sorted({*found, *asked}):
                if found.get(name) != asked.get(name):
                    raise InvalidParameter(
                        name,
                        asked.get(name),
                        f"{found.get(name)!r}, with which {str(self.path)!r} was begun, or another output folder",
                    )
            for number, line in enumerate(self.lines[1:], start=2):
                match _parsed(line):
                    case [[*key], value] if all(isinstance(part, (int, str)) for part in key):
                        self[tuple(key)] = value
                    case _:
                        raise self.refused(
                            f"a folder of an evaluation: line {number} is damaged; remove it to do its work again"
                        )
            self.mend()  # cut off the line that was not finished, if any
            if not self.lines:
                self.write(head.encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def add(self, key: Key, value: Any) -> None:
        """Keep an entry."""
        self.write(json.dumps([list(key), value]).encode() + b"\n")
        self[key] = value

    def answers(
        self,
        key: Key,
        prompts: Sequence[Any],
        ask: Callable[[Sequence[Any]], Sequence[Any]],
        failed: Any = None,
    ) -> list[Any]:
        """Return the answers of this key. Ask for them if they are missing, and keep them.

        ``ask`` answers some of the prompts, with ``failed`` for each that has no answer. A prompt that fails among
        others is asked once more, beside one that has an answer: if that one fails too, the model is gone. Raises
        `ModelUnavailable` if no prompt has an answer, or the model is gone; nothing of an outage is kept.
        """
        if key not in self:
            found = list(ask(prompts))
            lacking = [i for i, answer in enumerate(found) if answer == failed]
            is_gone = len(lacking) == len(found)
            if lacking and not is_gone:
                answered = next(i for i in range(len(found)) if i not in lacking)
                known, *again = ask([prompts[i] for i in (answered, *lacking)])
                is_gone = known == failed
                for i, answer in zip(lacking, again, strict=True):
                    found[i] = answer
            if is_gone:
                raise ModelUnavailable(
                    "the model answers no prompt of a query: is it up, is its key right, and do label prompts get "
                    f"log-probabilities? Earlier answers are kept in {str(self.path)!r}; the same command resumes"
                )
            self.add(key, found)
        kept: list[Any] = self[key]
        return kept


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def key_of(text: str) -> str:
    """A stable name for a text that shows nothing of it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ask_members(member: Runnable[Any, Any], prompts: Sequence[Pairs], query: str) -> list[Any]:
    """Return a sealed member's output for each prompt's examples, called as a release calls it; None for a failure."""
    requests = [
        ({"input": query}, [{"input": asked, "output": answer} for asked, answer in pairs]) for pairs in prompts
    ]
    found = boundary.run_private(Pristine(member), requests, max_concurrency=8)
    return [None if each is boundary.ABSTAIN else each for each in found]


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationPlan:
    """The numbers of owners, members and releases, and the epsilons for which the noise is solved.

    ``shots`` is the expected number of owners in a member's prompt, so the rate is members * shots / owners. With
    ``calls`` each sampled owner has a prompt of its own, so many on average, and ``members`` is their padded number.
    ``few_shots`` is the number of examples in the prompts that are not private, for comparison.
    """

    owners: int
    members: int
    shots: int
    releases: int
    delta: float
    epsilons: Sequence[float]
    few_shots: int = 4
    calls: int = 0

    def __post_init__(self) -> None:
        checks.whole("owners", self.owners)
        checks.whole("shots", self.shots)
        checks.whole("members", self.members, at_least=2)
        checks.whole("few_shots", self.few_shots, at_most=self.owners)
        checks.whole("releases", self.releases, at_most=MAX_COUNT)
        checks.open_unit("delta", self.delta)
        if not self.epsilons:
            raise InvalidParameter("epsilon", self.epsilons, "at least one number")
        for epsilon in self.epsilons:
            checks.real("epsilon", epsilon, above=0.0, at_most=1000.0)
        checks.whole("calls", self.calls, at_least=0, at_most=self.owners)
        if not self.calls and self.members * self.shots > self.owners:
            raise InvalidParameter("shots", self.shots, f"members * shots at most the number of owners, {self.owners}")

    @property
    def rate(self) -> float:
        """An owner's probability to take part in one release."""
        return (self.calls or self.members * self.shots) / self.owners

    @property
    def crowd(self) -> Crowd:
        """The public numbers of a vote's outputs."""
        return Crowd.of(self.members, self.rate, self.owners, self.calls or None)

    @property
    def facts(self) -> dict[str, float]:
        """The public numbers of a private answer."""
        size = ("members", "calls") if self.calls else ("members", "shots")
        return {name: getattr(self, name) for name in (*size, "rate", "releases", "delta")}

    def varied(self, **numbers: int) -> EvaluationPlan:
        """The same plan with other numbers. Other members keep their shots, so the rate changes.

        The first n members of N are a sample of the plan with n members, whose rate is n / N of this one's: every owner
        draws its member on its own.
        """
        return replace(self, **numbers)  # type: ignore[arg-type]

    def parameter(
        self,
        epsilon: float,
        mechanism: str,
        options: Mapping[str, float] | None = None,
        rate: float | None = None,
    ) -> float:
        """The noise that this epsilon allows; at another rate, if one is given."""
        if options is None:
            options = options_of(self.crowd)
        if rate is None:
            rate = self.rate
        request = LineRequest(mechanism, rate, self.releases, options=dict(options))
        return PrivacyPlan.alone(request, epsilon=epsilon, delta=self.delta).parameter


class Sampler:
    """Draws the examples of prompts from rows, by the release's own sampling; every row is its own owner.

    A sample has these prompts: one for each member, with its bucket; one without examples; one with ``few_shots``
    private examples; and if there are public rows, one with as many of them. Every query gets the same samples: its
    answer then has the law that it has with a sample of its own, so a score has the same mean; between samples it
    varies more.
    """

    def __init__(self, rows: Sequence[Row], public: Sequence[Row], plan: EvaluationPlan) -> None:
        needed = plan.calls or plan.members * plan.shots
        if len(rows) < needed:
            words = "calls" if plan.calls else "members * shots"
            raise InvalidParameter("data", f"{len(rows)} records", f"at least {words} = {needed} records")
        store = ExemplarStore.from_records(
            [{"input": row.input, "output": row.output, "row": i} for i, row in enumerate(rows)],
            FakeEmbeddings(size=1),  # never asked: nothing is looked for by similarity
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(rows), 1), np.float32),
        )
        if plan.calls:
            self._selector = PoissonExampleSelector(store, calls=plan.calls, pad_to=plan.members)
        else:
            self._selector = PoissonExampleSelector(store, plan.members, shots=plan.shots)
        self._rows = rows
        self._public = public
        self._plan = plan

    def draw(self, number: int, file: PassFile) -> list[Pairs]:
        """The prompts of this sample. It is drawn once; the file keeps it."""
        key = ("sample", number)
        if key not in file:
            members = self._plan.members
            buckets = [[int(each["row"]) for each in bucket] for bucket in self._selector.sample()][:members]
            buckets += [[]] * (members - len(buckets))  # a sample of more calls is rare, and loses its last here
            orders = [np.argsort(SecureRandomness().uniforms(len(rows))) for rows in (self._rows, self._public)]
            file.add(key, [buckets, *(order[: self._plan.few_shots].tolist() for order in orders)])
        buckets, few_shot, public = file[key]
        prompts = [(self._rows, bucket) for bucket in (*buckets, (), few_shot)]
        if self._public:
            prompts.append((self._public, public))
        return [[(rows[i].input, rows[i].output) for i in chosen] for rows, chosen in prompts]

    def filled(self, number: int, file: PassFile) -> list[bool]:
        """Return for each member of this sample whether it has an example; the other members' answers do not count."""
        self.draw(number, file)
        return [bool(bucket) for bucket in file["sample", number][0]]

"""What a budget is asked for, before its plan is solved: how many releases of each line, and what each line is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from langchain_dpicl.errors import InvalidParameter, PlanIncomplete, PlanMismatch
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PlanLine, PrivacyPlan, checks, default_delta0

Releases = int | Mapping[str, int | LineRequest]


@dataclass
class Declaration:
    """What is known of a line: its mechanism, its rate, the options that somebody chose, and from how many owners the
    rate was chosen, if it was."""

    mechanism: str
    rate: float
    rate_is_explicit: bool
    options: dict[str, float] = field(default_factory=dict)
    owners: int | None = None

    def __post_init__(self) -> None:
        family = MECHANISMS.get(self.mechanism) if isinstance(self.mechanism, str) else None
        if family is None:
            raise InvalidParameter("mechanism", self.mechanism, f"one of {', '.join(MECHANISMS)}")
        self.rate = checks.probability("rate", self.rate)
        needed = {key: option.high for key, option in family.options.items() if option.default is None}
        checked = family.check_options({**needed, **self.options})
        self.options = {key: checked[key] for key in self.options}

    def absorb(self, other: Declaration, where: str) -> None:
        """Take in another declaration of the same line. `PlanMismatch` if both cannot be true."""
        both = {key: (self.options[key], other.options[key]) for key in self.options.keys() & other.options.keys()}
        pairs = {"mechanism": (self.mechanism, other.mechanism), **both}
        if self.rate_is_explicit and other.rate_is_explicit:
            pairs["rate"] = (self.rate, other.rate)
        for key, (mine, theirs) in pairs.items():
            if mine != theirs:
                raise PlanMismatch(f"{where} was declared with {key} {mine!r} (asked: {theirs!r})")
        self.options |= other.options
        if other.rate_is_explicit:
            self.rate, self.rate_is_explicit, self.owners = other.rate, True, other.owners


class Schedule:
    """The lines of a budget. One number of releases means one line, named after its mechanism once that is known."""

    def __init__(self, releases: Releases) -> None:
        self.asked: dict[str, LineRequest] = {}
        self._declared: dict[str, Declaration] = {}
        self.counts: dict[str, int] | int
        if not isinstance(releases, Mapping):
            self.counts = checks.whole("releases", releases)
            return
        self.counts = {}
        if not releases:
            raise InvalidParameter("releases", dict(releases), "at least one line")
        for name, value in releases.items():
            if not isinstance(name, str) or not name or ":" in name or len(name) > 255:
                raise InvalidParameter("releases", name, 'names of 1 to 255 characters without ":"')
            if isinstance(value, LineRequest):
                self.asked[name] = value
                self._declared[name] = _declared(value)
                self.counts[name] = value.count
            else:
                self.counts[name] = checks.whole(f"releases[{name!r}]", value)

    @property
    def names(self) -> list[str]:
        """The lines' names; none before one unnamed line's mechanism is known."""
        return list(self._declared) if isinstance(self.counts, int) else list(self.counts)

    def mechanism(self, name: str) -> str | None:
        """What a line is, if somebody said so."""
        known = self._declared.get(name)
        return None if known is None else known.mechanism

    def count(self, name: str) -> int:
        """Releases of a line."""
        return self.counts if isinstance(self.counts, int) else self.counts[name]

    def name_of(self, name: str | None, mechanism: str | None = None) -> str:
        """Which line is meant. With one line nobody has to say; with several, `InvalidParameter` lists the names."""
        if isinstance(self.counts, int):
            expected = next(iter(self._declared), mechanism)
            if name is not None and name != expected and name != mechanism:
                raise InvalidParameter("line", name, f"this budget has one line, {expected or 'not declared yet'}")
            return expected or ""
        if name is None and len(self.counts) == 1:
            return next(iter(self.counts))
        if name is None or name not in self.counts:
            raise InvalidParameter("line", name, f"one of this budget's lines: {', '.join(self.counts)}")
        return name

    def declare(self, name: str | None, declaration: Declaration) -> str:
        """Remember what a line is; the line's name. `PlanMismatch` against a declaration that says otherwise."""
        name = self.name_of(name, declaration.mechanism)
        known = self._declared.get(name)
        if known is not None:
            known.absorb(declaration, f"the line {name!r}")
        elif isinstance(self.counts, int) and self._declared:
            (known,) = self._declared.values()
            known.absorb(declaration, "the budget's one line")
        else:
            self._declared[name] = declaration
        return name

    def requests(self, delta: float) -> dict[str, LineRequest]:
        """Every line, complete. `PlanIncomplete` names those that nobody has declared."""
        missing = [name for name in self.names if name not in self._declared]
        if missing:
            raise PlanIncomplete(
                f"the plan is solved for all its lines, and nothing has declared {', '.join(missing)}: build every "
                "chain before the first release (a DPAggregate declares its line), call budget.declare(line, "
                "mechanism, rate), or give releases={line: LineRequest(...)}; nothing was charged"
            )
        tests = sum(known.mechanism == "ptr" for known in self._declared.values())
        answer = {}
        for name, known in self._declared.items():
            count, options = self.count(name), dict(known.options)
            if known.mechanism == "ptr" and "delta0" not in options:
                options["delta0"] = default_delta0(delta, known.rate, count, tests)
            weight = self.asked[name].weight if name in self.asked else 1.0
            answer[name] = LineRequest(known.mechanism, known.rate, count, weight, options, owners=known.owners)
        return answer

    def differences(self, plan: PrivacyPlan) -> dict[str, tuple[object, object]]:
        """Where a frozen plan is not what the budget asks for: what, frozen, asked."""
        frozen = {name: line.count for name, line in plan.lines.items()}
        if isinstance(self.counts, int):
            found: object = next(iter(frozen.values())) if len(frozen) == 1 else frozen
            return {} if found == self.counts else {"releases": (found, self.counts)}
        asked = dict(sorted(self.counts.items()))
        if frozen != asked:
            return {"releases": (frozen, asked)}
        pairs: dict[str, tuple[object, object]] = {}
        for name, request in self.asked.items():
            pairs |= against(plan.lines[name], _declared(request))
            if plan.lines[name].weight != request.weight:
                pairs["weight"] = (plan.lines[name].weight, request.weight)
        return pairs


def _declared(request: LineRequest) -> Declaration:
    return Declaration(request.mechanism, request.rate, True, dict(request.options), request.owners)


def against(line: PlanLine, asked: Declaration) -> dict[str, tuple[object, object]]:
    """Where a frozen line is not what was declared. Options and a rate that nobody chose are not compared, nor is how
    many owners there are by now."""
    pairs: dict[str, tuple[object, object]] = {
        "mechanism": (line.mechanism, asked.mechanism),
        "options": ({key: line.options.get(key) for key in asked.options}, asked.options),
    }
    if asked.rate_is_explicit:
        pairs["rate"] = (line.rate, asked.rate)
        if asked.owners is not None:
            pairs["owners"] = (line.owners, asked.owners)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

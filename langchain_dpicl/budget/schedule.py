"""The lines of a budget before its plan is solved: its releases, and the declarations of chains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from langchain_dpicl.errors import InvalidParameter, PlanIncomplete, PlanMismatch
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, checks, default_delta0

Releases = int | Mapping[str, int | LineRequest]
Declared = tuple[LineRequest, frozenset[str]]
"""A line and the names of its values that somebody chose: "rate", and options. The others may still change."""


def declared(
    mechanism: str, rate: float, rate_is_explicit: bool, owners: int | None, options: Mapping[str, float] | None
) -> Declared:
    """A declaration, checked. Its count is set when the plan is solved."""
    chosen = dict(options or {})
    family = MECHANISMS.get(mechanism) if isinstance(mechanism, str) else None
    fixed = {} if family is None else family.options
    needed = {key: option.high for key, option in fixed.items() if option.default is None}
    request = LineRequest(mechanism, rate, 1, options={**needed, **chosen}, owners=owners)
    return request, frozenset([*chosen, "rate"] if rate_is_explicit else chosen)


def differences(
    line: LineRequest, asked: LineRequest, chosen: Collection[str], owners: int | None = None
) -> dict[str, tuple[object, object]]:
    """The values of a line that are not as asked: each value and the value asked for. Only chosen values are compared.

    ``owners``: from how many a chosen rate was computed. A store may have other owners by now, or none.
    """
    options = [key for key in asked.options if key in chosen]
    pairs: dict[str, tuple[object, object]] = {
        "mechanism": (line.mechanism, asked.mechanism),
        "options": ({key: line.options.get(key) for key in options}, {key: asked.options[key] for key in options}),
    }
    if "rate" in chosen:
        pairs["rate"] = (line.rate, asked.rate)
        if owners is not None:
            pairs["owners"] = (line.owners, owners)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


class Schedule:
    """The lines of a budget. One number of releases means one line, named after its mechanism once that is known."""

    def __init__(self, releases: Releases) -> None:
        self._asked: dict[str, LineRequest] = {}
        self._declared: dict[str, Declared] = {}
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
                self._asked[name] = value
                self._declared[name] = value, frozenset([*value.options, "rate"])
                self.counts[name] = value.count
            else:
                self.counts[name] = checks.whole(f"releases[{name!r}]", value)

    @property
    def names(self) -> list[str]:
        """The lines' names; none while the mechanism of one unnamed line is not known."""
        return list(self._declared) if isinstance(self.counts, int) else list(self.counts)

    def line(self, name: str) -> tuple[int, str | None]:
        """A line's releases, and its mechanism; None until it is declared."""
        count = self.counts if isinstance(self.counts, int) else self.counts[name]
        return count, self._declared[name][0].mechanism if name in self._declared else None

    def name_of(self, name: str | None, mechanism: str | None = None) -> str:
        """The name of the line that is meant. None means the only line; `InvalidParameter` if there are several."""
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

    def declare(self, name: str | None, asked: LineRequest, chosen: frozenset[str]) -> None:
        """Remember a declaration. `PlanMismatch` if it contradicts an earlier declaration."""
        name = self.name_of(name, asked.mechanism)
        if name not in self._declared:
            self._declared[name] = asked, chosen
            return
        known, chosen_before = self._declared[name]
        for key, (mine, theirs) in differences(known, asked, chosen & chosen_before).items():
            raise PlanMismatch(f"the line {name!r} was declared with {key} {mine!r} (asked: {theirs!r})")
        latest = asked if "rate" in chosen else known
        options = {**known.options, **{key: value for key, value in asked.options.items() if key in chosen}}
        merged = replace(known, rate=latest.rate, owners=latest.owners, options=options)
        self._declared[name] = merged, chosen | chosen_before

    def requests(self, delta: float) -> dict[str, LineRequest]:
        """Every line, complete. `PlanIncomplete` names the lines that nobody has declared."""
        missing = [name for name in self.names if name not in self._declared]
        if missing:
            raise PlanIncomplete(
                f"the plan is solved for all its lines, and nothing has declared {', '.join(missing)}: build every "
                "chain before the first release (a DPAggregate declares its line), call budget.declare(line, "
                "mechanism, rate), or give releases={line: LineRequest(...)}; nothing was charged"
            )
        tests = sum(line.mechanism == "ptr" for line, _ in self._declared.values())
        answer = {}
        for name, (line, chosen) in self._declared.items():
            count, _ = self.line(name)
            options = dict(line.options)
            if line.mechanism == "ptr" and "delta0" not in chosen:
                options["delta0"] = default_delta0(delta, line.rate, count, tests)
            answer[name] = replace(line, count=count, options=options)
        return answer

    def differences(self, plan: PrivacyPlan) -> dict[str, tuple[object, object]]:
        """Where a frozen plan is not as this budget asks: the frozen value and the value asked for."""
        frozen = {name: line.count for name, line in plan.lines.items()}
        if isinstance(self.counts, int):
            found: object = next(iter(frozen.values())) if len(frozen) == 1 else frozen
            return {} if found == self.counts else {"releases": (found, self.counts)}
        asked = dict(sorted(self.counts.items()))
        if frozen != asked:
            return {"releases": (frozen, asked)}
        pairs: dict[str, tuple[object, object]] = {}
        for name, request in self._asked.items():
            pairs |= differences(plan.lines[name], request, [*request.options, "rate"], request.owners)
            if plan.lines[name].weight != request.weight:
                pairs["weight"] = (plan.lines[name].weight, request.weight)
        return pairs

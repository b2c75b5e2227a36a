"""What calibration costs, against the libraries that do it today. Measures both sides in one run and prints the ratios.

- the vote plan (q = 40/6920, 10^4 releases, delta 1e-4, epsilon 3), cold and without the cache, against
  prv-accountant's `find_noise_multiplier` at eps_error .01 and dp-accounting's `calibrate_dp_mechanism` with its PLD
  accountant at tol 1e-3
- a plan of four line items and 10^5 releases
- the noise that each allows
- one certified epsilon, and `spent` after the first call; the slowest step of `spent` where owners take part rarely
- the command `dpicl plan` at low rates, each in a process of its own: CPU seconds, imports included
- how far the grid costs epsilon, from closed forms
- what the same promise buys, before and now, with the ratio. Joint EM's range at epsilon 1, 3 and 8 (q = 400/14732, 100
  releases, delta 5e-5): by its profile's losses, and by adaptive composition. How often noise overturns a vote (q =
  40/6920, 1,000 releases, epsilon 3, delta 1e-5) whose winner is 2 or 4 votes ahead: Gaussian with shared buckets, and
  the other kinds
- a joint EM plan of 10^4 releases
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from figures import show

from langchain_dpicl.privacy import (
    BoundedRange,
    Gaussian,
    Line,
    LineRequest,
    PLDAccountant,
    PrivacyPlan,
)
from langchain_dpicl.privacy.mechanisms import OWN_CALLS
from langchain_dpicl.privacy.profile import Composed, Profile
from langchain_dpicl.privacy.votes import VoteNoise

RATE, COUNT, EPSILON, DELTA = 40 / 6920, 10_000, 3.0, 1e-4
VOTE = {"vote": LineRequest("vote", RATE, COUNT)}
MIXED = {
    "classify": LineRequest("vote", RATE, 90_000, weight=9.0),
    "summarise": LineRequest("embedding", 0.02, 1_000),
    "keywords": LineRequest("joint-em", 0.01, 5_000),
    "ptr": LineRequest("ptr", 0.01, 4_000, options={"delta0": 1e-10}),
}


def timed(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Median seconds, and the last answer."""
    seconds, answer = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        answer = function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), answer


def cold_solve() -> tuple[float, float]:
    """Seconds of the first solve in a fresh process, imports of the accountant's own libraries included, and sigma."""
    code = (
        "import time\n"
        "from langchain_dpicl.privacy import LineRequest, PrivacyPlan\n"
        "started = time.perf_counter()\n"
        f"lines = {{'vote': LineRequest('vote', {RATE!r}, {COUNT})}}\n"
        f"plan = PrivacyPlan.solve(epsilon={EPSILON}, delta={DELTA}, lines=lines)\n"
        "print(time.perf_counter() - started, plan.lines['vote'].parameter)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return float(out[0]), float(out[1])


def prv_calibration() -> float:
    """prv-accountant's own search (Gaussian noise multiplier)."""
    from prv_accountant.dpsgd import find_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(find_noise_multiplier(RATE, COUNT, EPSILON, DELTA, eps_error=0.01))


def dp_accounting_calibration() -> float:
    """dp-accounting's own search with its PLD accountant (Gaussian noise multiplier)."""
    import dp_accounting

    def event(sigma: float) -> Any:
        sampled = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(sampled, COUNT)

    found = dp_accounting.calibrate_dp_mechanism(
        lambda: dp_accounting.pld.PLDAccountant(), event, EPSILON, DELTA, tol=1e-3
    )
    return float(found)


def by_losses(profile: Profile) -> Profile:
    """The same, of which the accountant knows the losses of the profile alone."""
    return Composed((profile,))


def solve_range(account: Callable[[Profile], Profile], epsilon: float) -> float:
    """The eps0 that epsilon allows a joint exponential mechanism: q = 400/14732, 100 releases, delta 5e-5."""
    low, high = 0.01, 20.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        cost = PLDAccountant().epsilon([Line(account(BoundedRange(middle)), 400 / 14732, 100)], 5e-5)
        low, high = (middle, high) if cost <= epsilon else (low, middle)
    return low


def flips(mechanism: str, own_calls: float, margin: int) -> float:
    """How often noise overturns a winner who is so many votes ahead."""
    request = LineRequest(mechanism, RATE, 1000, options={OWN_CALLS: own_calls})
    line = PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines={"vote": request}).lines["vote"]
    return VoteNoise(mechanism, line.parameter, line.own_calls).flip(margin, 2)


def bought() -> dict[str, float]:
    """What the same promise buys, before and now."""
    figures: dict[str, float] = {}

    def compare(name: str, before: float, now: float, target: str, times: float) -> None:
        figures[f"{name}, before"], figures[f"{name}, now{target}"] = before, now
        figures[f"{name}, times better"] = times

    for epsilon, least in ((1.0, 1.75), (3.0, 3.22), (8.0, 4.83)):
        old, new = solve_range(by_losses, epsilon), solve_range(lambda profile: profile, epsilon)
        compare(f"joint EM at epsilon {epsilon:g}, eps0", old, new, f" (at least {least:g})", new / old)
    shared = {margin: flips("vote", 0.0, margin) for margin in (2, 4)}
    kinds = {"exponential": ("vote-em", 0.0), "Gaussian, own calls": ("vote", 1.0)}
    for name, kind in (kinds | {"exponential, own calls": ("vote-em", 1.0)}).items():
        for margin, old in shared.items():
            new = flips(*kind, margin)
            compare(f"vote {margin} ahead, {name}, flips", old, new, "", old / new)
    return figures


def grid_cost() -> float:
    """The largest relative excess over the exact epsilon of composed Gaussians without sampling."""
    from scipy.optimize import brentq

    worst = 0.0
    for count in (2, 30, 1000, 1_000_000):
        for total in (0.3, 1.0, 5.0, 30.0):
            for delta in (1e-4, 1e-8, 1e-12):

                def gap(epsilon: float, total: float = total, delta: float = delta) -> float:
                    return float(Gaussian(total).delta(epsilon)) - delta

                if gap(0.0) <= 0.0:
                    continue
                exact = float(brentq(gap, 0.0, 0.5 / total**2 + 12.0 / total, xtol=1e-14))
                ours = PLDAccountant().epsilon([Line(Gaussian(total * math.sqrt(count)), 1.0, count)], delta)
                worst = max(worst, ours / exact - 1.0)
    return worst


def slowest_step(rate: float) -> float:
    """CPU seconds of the slowest receipt of a plan at this rate, whose 10^4 receipts show some fifty epsilons."""
    request = {"vote": LineRequest("vote", rate, COUNT)}
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-6, lines=request)
    slowest = 0.0
    for count in sorted({max(1, round(COUNT ** (i / 60))) for i in range(61)}):
        started = time.process_time()
        plan.spent({"vote": count})
        slowest = max(slowest, time.process_time() - started)
    return slowest


def planned(rate: float) -> float:
    """CPU seconds of ``dpicl plan`` for ten votes at this rate."""
    before = os.times()
    options = f"--epsilon 3 --delta 1e-5 --releases 10 --rate {rate!r} --accept-noise --json".split()
    subprocess.run([sys.executable, "-m", "langchain_dpicl", "plan", *options], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(repeats: int, fast: bool) -> dict[str, Any]:
    """Every figure as one dictionary; `fast` leaves the libraries' searches out."""
    cold = [cold_solve() for _ in range(repeats)]
    warm, plan = timed(lambda: PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines=VOTE), max(3, repeats))
    sigma = plan.lines["vote"].parameter
    mixed, mixed_plan = timed(lambda: PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines=MIXED), repeats)
    one, _ = timed(lambda: PLDAccountant().epsilon([plan.lines["vote"].line(sigma)], DELTA), 5)
    first_spent, _ = timed(lambda: plan.spent({"vote": 1}))
    later_spent, _ = timed(lambda: [plan.spent({"vote": n}) for n in range(1, 1001)])
    figures: dict[str, Any] = {
        "vote plan, cold, seconds": statistics.median(seconds for seconds, _ in cold),
        "vote plan, warm, seconds": warm,
        "vote plan, noise multiplier": sigma / math.sqrt(2.0),
        "vote plan, share of epsilon used": plan.certified_epsilon / EPSILON,
        "mixed plan of 4 lines and 1e5 releases, seconds (at most 2)": mixed,
        "mixed plan, share of epsilon used": mixed_plan.certified_epsilon / 3.0,
        "one certified epsilon, seconds": one,
        "spent, first call, seconds": first_spent,
        "spent, later calls, seconds": later_spent / 1000,
        "largest excess over closed forms": grid_cost(),
    }
    for rate in (1e-4, 1e-5, 1e-6):
        figures[f"spent, slowest call at rate {rate:g}, CPU seconds (at most 0.5)"] = slowest_step(rate)
    for rate in (1e-5, 1e-6, 1e-10, 1e-12, 1e-300):
        figures[f"dpicl plan at rate {rate:g}, CPU seconds (at most 3)"] = planned(rate)
    figures |= bought()
    ten_thousand = {"keywords": LineRequest("joint-em", RATE, COUNT)}
    seconds, _ = timed(lambda: PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines=ten_thousand))
    figures["joint EM plan of 1e4 releases, seconds (at most 10)"] = seconds
    if not fast:
        figures["prv-accountant, seconds"], prv = timed(prv_calibration)
        figures["prv-accountant, noise multiplier"] = prv
        figures["dp-accounting, seconds"], library = timed(dp_accounting_calibration)
        figures["dp-accounting, noise multiplier"] = library
        cold_seconds = figures["vote plan, cold, seconds"]
        figures["times faster than prv-accountant (at least 10)"] = figures["prv-accountant, seconds"] / cold_seconds
        figures["times faster than dp-accounting (at least 20)"] = figures["dp-accounting, seconds"] / cold_seconds
    return figures


def missed(name: str, value: float) -> bool:
    """Whether a figure misses the target that its name states."""
    target = re.search(r"\(at (least|most) ([0-9.]+)\)$", name)
    return target is not None and (value < float(target[2]) if target[1] == "least" else value > float(target[2]))


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fast", action="store_true", help="leave the libraries' own searches out")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    figures = measure(args.repeats, args.fast)
    show(figures, args.json)
    return int(any(missed(name, value) for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())

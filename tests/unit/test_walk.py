"""How far one vote travels: no change of the package makes its way longer without saying so here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[1] / "bench" / "walk_release.py"

MOST = {
    "a vote": {"fixed": 197, "by_call": 43.0, "modules": 29},
    "a vote with tickets": {"fixed": 285, "by_call": 43.0, "modules": 32},
}
"""These figures may only fall: calls of the package's functions by a release, and by each of its calls; modules."""


def test_a_vote_goes_no_further_than_before() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", WALK, "--json"], capture_output=True, text=True, timeout=240, check=True
    )
    for name, found in json.loads(done.stdout).items():
        longer = {figure: value for figure, value in found.items() if value > MOST[name][figure]}
        assert longer == {}, f"{name}: at most {MOST[name]}"

"""Make tests/data/cba1951/desk.jsonl.dpicl, the notes of a data file, by the code of cba1951, which wrote such files.

python tests/data/make_cba1951.py
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    code = subprocess.check_output(["git", "show", "cba1951:langchain_dpicl/store/notes.py"], text=True)
    notes = types.ModuleType("notes")
    sys.modules[notes.__name__] = notes  # where its data class is looked for
    exec(code, vars(notes))
    place = Path(__file__).with_name("cba1951") / "desk.jsonl.dpicl"
    place.unlink(missing_ok=True)
    kept = notes.DataNotes(place)
    kept.remember([notes.OpenedBudget("1" * 32, "sqlite:////gone/one.db", "one", 2.0, 1e-5)])
    kept.remember([notes.OpenedBudget("2" * 32, "sqlite:////gone/two.db", "two", 1.0, 1e-6)])

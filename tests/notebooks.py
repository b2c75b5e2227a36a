"""Runs a notebook: its code cells, one after the other, in one namespace. As a script it keeps what they print:
`python tests/notebooks.py docs/notebooks/*.ipynb`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(path: Path) -> dict[str, Any]:
    """Run a notebook in the current folder, and return it with what its cells printed."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                _run_cell("".join(cell["source"]), names)
            text = printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    return notebook


def _run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell, and print its last line if that is an expression with a value."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(value)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            made = run(file)
        file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(os.path.basename(name))

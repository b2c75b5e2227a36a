"""Each optional part that is missing names its extra and the command, wherever it is asked for."""

import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import langchain_dpicl
from langchain_dpicl import ExemplarStore, LineRequest, MissingExtra, PrivacyBudget, PrivacyPlan, StoreError, local
from langchain_dpicl.cli import main, parse
from langchain_dpicl.cli.mcp import mcp
from langchain_dpicl.decoding.backends import loading
from langchain_dpicl.extras import require
from langchain_dpicl.lab.evaluation.rows import load_rows
from langchain_dpicl.lab.evaluation.scores import text_scores
from langchain_dpicl.lab.evaluation.tasks import TASKS
from langchain_dpicl.lab.plots import draw_panels
from langchain_dpicl.members.chains import ModelChoice
from langchain_dpicl.serving.routes import add_dp_routes

ROOT = Path(langchain_dpicl.__file__).parents[1]


def shut(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let no module of this package import."""
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def serve() -> Any:
    return add_dp_routes(FastAPI(), None, "/route", principal_from=str)  # type: ignore[arg-type]


WAYS: list[tuple[str, str, Callable[[], Any]]] = [
    ("langchain_openai", "local", local.local_llm),
    ("langchain_openai", "openai", lambda: ModelChoice("gpt", "http://127.0.0.1:9").load()),
    ("matplotlib", "eval", lambda: draw_panels([], "plan.png")),
    ("rapidfuzz", "eval", lambda: text_scores(["a"], ["b"])),
    ("sacrebleu", "eval", lambda: text_scores(["a"], ["b"])),
    ("rouge_score", "eval", lambda: text_scores(["a"], ["b"])),
    ("datasets", "hub", lambda: load_rows(TASKS["sst2"], "hub")),
    ("torch", "local", lambda: loading.load("gemma3-270m", "float32")),
    ("transformers", "local", lambda: loading.load("gemma3-270m", "float32")),
    ("psycopg", "postgres", lambda: PrivacyBudget(1.0, 1e-6, 10, ledger="postgresql://host/base", name="a").spent()),
    ("fastapi", "serve", serve),
    ("mcp", "mcp", lambda: mcp(parse(["mcp", "--config", "server.yaml"]))),
]


@pytest.mark.parametrize(("module", "extra", "use"), WAYS, ids=[f"{module}-{extra}" for module, extra, _ in WAYS])
def test_what_is_missing_names_its_extra(
    module: str, extra: str, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shut(monkeypatch, module)
    with pytest.raises(MissingExtra, match=rf'{module}.*pip install "langchain-dpicl\[{extra}\]"') as caught:
        use()
    assert caught.value.extra == extra
    assert isinstance(caught.value, ImportError)
    assert caught.value.__context__ is None  # no frame of a caller's


def test_a_store_tells_why_its_model_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shut(monkeypatch, "sentence_transformers")
    model = local.LocalEmbeddings(tmp_path)
    with pytest.raises(StoreError, match=r'sentence_transformers.*pip install "langchain-dpicl\[local\]"'):
        ExemplarStore.from_records([{"input": "private words", "output": "a"}], model)


def test_an_opinion_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    shut(monkeypatch, "dp_accounting")
    plan = PrivacyPlan.solve(epsilon=2.0, delta=1e-5, lines={"votes": LineRequest("vote", 0.02, 100)})
    assert 'pip install "langchain-dpicl[verify]"' in str(plan.verify())


def test_a_native_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dpicl_broken_part.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match="libgomp"):
        require("dpicl_broken_part", "local")


def test_the_command_line_says_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shut(monkeypatch, "uvicorn")
    assert main(["serve", "--config", "server.yaml", "--check"]) == 1
    assert 'pip install "langchain-dpicl[serve]"' in capsys.readouterr().err


def test_every_extra_that_the_package_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {
        extra
        for path in (ROOT / "langchain_dpicl").rglob("*.py")
        for text in [path.read_text("utf-8")]
        for extra in [*re.findall(r'require\([^)]*?, "(\w+)"\)', text), *re.findall(r"langchain-dpicl\[(\w+)\]", text)]
    }
    assert {"local", "mcp", "openai", "serve", "eval", "hub", "parquet", "postgres", "verify"} <= named <= set(extras)


def test_serving_brings_no_langserve() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    bring = [extra for extra, parts in extras.items() if any(part.startswith("langserve") for part in parts)]
    assert bring == ["dev"]


@pytest.mark.parametrize("own", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_library_is_loaded_with_short_spins_unless_the_user_has_set_them(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spins_seen.py").write_text("import os\nSEEN = os.environ.get('GOMP_SPINCOUNT')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spins_seen", raising=False)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(own, "7")
    before = dict(os.environ)
    expected = {None: "1000", "OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "7"}[own]
    found = require("spins_seen", "local").SEEN
    assert found == expected
    assert dict(os.environ) == before

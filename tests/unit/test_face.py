"""The package's face: what it exports, what importing it loads, and that every floor imports downwards only."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import langchain_dpicl

ROOT = Path(langchain_dpicl.__file__).parent

LAYERS: list[set[str]] = [
    {"errors"},
    {"extras"},
    {"privacy", "sql", "durable", "parameters"},
    {"calls"},
    {"private"},
    {"store", "aggregators", "local"},
    {"selection", "budget", "members"},
    {"release"},
    {"decoding", "demo"},
    {"once", "retrieval"},
    {"spec"},
    {"serving"},
    {"cli"},
    {"lab"},
    {"__main__"},
]
"""From the ground up, as in section 6 of the design. Packages of one layer do not import each other."""

LAYER_OF = {package: height for height, packages in enumerate(LAYERS) for package in packages}
HEAVY = [
    "torch", "transformers", "sentence_transformers", "faiss", "prv_accountant", "dp_accounting", "opendp",
    "sqlalchemy", "scipy", "xllamacpp", "openai", "langchain_openai", "langchain", "matplotlib", "fastapi", "langserve",
]  # fmt: skip


# -- what it exports ---------------------------------------------------------------------------------------------------


def test_the_list_of_names_is_sorted_and_has_no_repetition() -> None:
    assert langchain_dpicl.__all__ == sorted(set(langchain_dpicl.__all__))


ALSO = {"PostgresExemplarStore": "ExemplarStore", "whole": "View"}
"""Second names, and the class of what is no class or function."""


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in langchain_dpicl.__all__:
        value = getattr(langchain_dpicl, name)
        assert getattr(value, "__name__", type(value).__name__) == ALSO.get(name, name)
        assert value.__module__.startswith("langchain_dpicl.")
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert name in dir(langchain_dpicl)


def test_every_public_method_is_documented() -> None:
    bare = [
        f"{name}.{member}"
        for name in langchain_dpicl.__all__
        for member, function in vars(getattr(langchain_dpicl, name)).items()
        if not member.startswith("_")
        and (inspect.isfunction(function) or isinstance(function, (property, classmethod)))
        and not inspect.getdoc(getattr(getattr(langchain_dpicl, name), member))
    ]
    assert bare == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        langchain_dpicl.Nothing  # noqa: B018
    assert not hasattr(langchain_dpicl, "nothing")


def test_the_type_checkers_imports_and_the_lazy_ones_agree() -> None:
    tree = tree_of(ROOT / "__init__.py")
    eager = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("langchain_dpicl")
        for alias in node.names
    }
    assert set(eager) == set(langchain_dpicl.__all__) == set(langchain_dpicl._HOME_OF)
    for name, module in langchain_dpicl._HOME_OF.items():
        assert eager[name] == f"langchain_dpicl.{module}"


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (ROOT / "py.typed").exists()
    assert langchain_dpicl.__version__.count(".") >= 2


# -- what importing it loads -------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import langchain_dpicl").isdisjoint([*HEAVY, "langchain_core", "numpy"])


@pytest.mark.parametrize(
    ("statement", "not_needed"),
    [
        ("from langchain_dpicl import ExemplarStore", {"torch", "transformers", "faiss", "prv_accountant"}),
        ("from langchain_dpicl import PoissonExampleSelector", {"torch", "transformers", "faiss"}),
        ("from langchain_dpicl import NoisyVote, PrivateEnsemble", {"torch", "faiss", "prv_accountant"}),
        (
            "from langchain_dpicl import PrivacyBudget, DPAggregate, LabelScorer",
            {"torch", "transformers", "faiss", "prv_accountant", "dp_accounting", "opendp", "xllamacpp", "openai"},
        ),
        ("import langchain_dpicl.errors", {"langchain_core", "numpy", "pydantic"}),
        ("import langchain_dpicl.privacy", {"langchain_core", "langchain", "langsmith", "sqlalchemy", "faiss"}),
    ],
)
def test_a_room_loads_what_it_needs_and_no_more(statement: str, not_needed: set[str]) -> None:
    assert loaded_by(statement).isdisjoint(not_needed)


# -- floors ------------------------------------------------------------------------------------------------------------


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative != Path("__init__.py"):
            yield relative.parts[0].removesuffix(".py"), path


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A module's syntax tree. Python 3.11 may raise SystemError if a destructor runs while it parses."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file, and whether the import happens when the file is loaded."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if is_for_type_checkers(child):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name} imports relatively"
                if child.module == "langchain_dpicl":
                    yield from ((f"langchain_dpicl.{alias.name}", at_load) for alias in child.names)
                else:
                    yield child.module or "", at_load
            else:
                inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_load and not inner)

    yield from walk(tree_of(path), True)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "langchain_dpicl" and len(parts) > 1 else None


def own_imports(path: Path) -> set[str]:
    """The modules of the package that a file imports: at load time, lazily, or for types alone."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("langchain_dpicl.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("langchain_dpicl"):
            assert node.module is not None
            found |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return found - {"langchain_dpicl"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for _, path in modules()}


def test_every_package_has_a_layer() -> None:
    assert {package for package, _ in modules()} <= set(LAYER_OF)


def test_nothing_imports_upwards_or_sideways() -> None:
    """Lazy imports and those for type checkers count."""
    upward = [
        f"{path.relative_to(ROOT)} imports {module}"
        for package, path in modules()
        for module in sorted(own_imports(path))
        if (target := room_of(module)) not in (None, package) and LAYER_OF[target or ""] >= LAYER_OF[package]
    ]
    assert upward == []


def test_no_modules_import_each_other() -> None:
    """No circle among modules, also not by a lazy import or one for type checkers."""
    needs = {name: own_imports(path) & MODULES.keys() for name, path in MODULES.items()}
    reached = {name: set(wanted) for name, wanted in needs.items()}
    for passing in MODULES:
        for found in reached.values():
            if passing in found:
                found |= reached[passing]
    assert sorted(name for name, found in reached.items() if name in found) == []


def test_no_file_is_longer_than_seven_hundred_lines() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for _, path in modules()}
    assert {name: number for name, number in lines.items() if number > 700} == {}


def test_no_two_types_have_one_name() -> None:
    """Classes, and aliases of types: the names of a module that begin with a capital and go on in small letters."""
    homes: dict[str, list[str]] = {}
    for _, path in modules():
        for node in tree_of(path).body:
            found = {node.name} if isinstance(node, ast.ClassDef) else set()
            if isinstance(node, ast.Assign):
                found = {target.id for target in node.targets if isinstance(target, ast.Name)}
            for name in found:
                if name[0].isupper() and not name.isupper() and len(name) > 1:
                    homes.setdefault(name, []).append(name_of(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_mathematics_knows_no_langchain() -> None:
    foreign = [
        f"{path.name} imports {module}"
        for room, path in modules()
        if room in ("privacy", "errors", "extras")
        for module, _ in imports(path)
        if module.startswith(("langchain_core", "langchain.", "langsmith", "langgraph", "sqlalchemy", "faiss"))
        or (room_of(module) or "errors") not in ("privacy", "errors", "extras")
    ]
    assert foreign == []


def test_no_room_imports_what_the_core_does_not_install() -> None:
    """Extras load when they are used, so that the core works without them."""
    extras = ("torch", "transformers", "sentence_transformers", "xllamacpp", "langchain_openai", "openai", "langserve")
    eager = [
        f"{path.relative_to(ROOT)} imports {module}"
        for _, path in modules()
        for module, at_load in imports(path)
        if at_load and module.split(".")[0] in (*extras, "fastapi", "matplotlib", "psycopg", "langchain_community")
    ]
    assert eager == []


def test_only_plots_draw() -> None:
    drawing = {
        str(path.relative_to(ROOT))
        for _, path in modules()
        for module, _ in imports(path)
        if module.split(".")[0] == "matplotlib"
    }
    assert drawing == {"lab/plots.py"}


def test_nothing_on_the_private_side_draws_from_a_generator_with_a_seed() -> None:
    """Mistake 16 of the design: `random` and `numpy.random` do not occur where a release is made."""
    guilty = []
    for room, path in modules():
        if room in ("store", "selection", "aggregators", "release", "private", "budget", "decoding"):
            tree = tree_of(path)
            names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            guilty += [path.name for name in names if name.startswith(("np.random", "numpy.random", "random."))]
            guilty += [path.name for module, _ in imports(path) if module == "random"]
    noise = (ROOT / "privacy" / "noise.py").read_text()
    assert guilty == []
    assert "np.random" not in noise
    assert "import random" not in noise

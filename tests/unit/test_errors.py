"""`errors.py`: the tree that its docstring draws is the tree that it defines, and nothing in it is fragile."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re

import pytest

from langchain_dpicl import errors
from langchain_dpicl.errors import (
    DPICLError,
    InvalidConfiguration,
    InvalidParameter,
    MembersAbstained,
    MissingExtra,
    ModelLost,
    ReleaseFailed,
    ShutWithinCall,
    UnknownOwner,
)

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__ and not name.startswith("_")
}


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """From the docstring: name -> (its parent in the drawing, the builtin in brackets)."""
    assert errors.__doc__ is not None
    drawing = errors.__doc__.split("::\n", 1)[1].split("\nNo message", 1)[0]
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in drawing.splitlines():
        match = re.match(r"^([ │├└─]*)([A-Z]\w+)(?: \((\w+)\))?", line)
        if not match:
            continue
        depth = len(match[1])
        above = [(d, name) for d, name in above if d < depth]
        tree[match[2]] = (above[-1][1] if above else None, match[3])
        above.append((depth, match[2]))
    return tree


def test_the_drawn_tree_is_the_tree_of_the_classes() -> None:
    tree = drawn_tree()
    assert set(tree) == set(CLASSES)
    for name, (parent, builtin) in tree.items():
        ours = [base.__name__ for base in CLASSES[name].__bases__ if base.__name__ in CLASSES]
        others = [base.__name__ for base in CLASSES[name].__bases__ if base.__module__ == "builtins"]
        assert ours == ([parent] if parent else [])
        expected = builtin or ("Exception" if name == "DPICLError" else None)
        assert others == ([expected] if expected else [])
        assert expected is None or hasattr(builtins, expected)


def test_every_error_is_documented_and_says_when_it_happens() -> None:
    for kind in CLASSES.values():
        assert kind.__doc__ is not None
        assert len(kind.__doc__) >= 25


def test_every_error_but_the_warning_is_caught_by_the_root() -> None:
    assert [name for name, kind in CLASSES.items() if not issubclass(kind, DPICLError)] == ["PrivacyWarning"]
    assert issubclass(CLASSES["PrivacyWarning"], UserWarning)


def samples() -> list[Exception]:
    parts: list[Exception] = [
        InvalidParameter("epsilon", -1, "a number > 0"),
        MissingExtra("torch", "local", "not found"),
    ]
    parts += [MembersAbstained(), ReleaseFailed(), ModelLost(), ShutWithinCall()]
    made = [*parts, InvalidConfiguration("server.yaml", [("", "missing: store")])]
    special = {type(error) for error in made}
    return made + [kind("a message") for kind in CLASSES.values() if kind not in special]


@pytest.mark.parametrize("error", samples(), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: Exception) -> None:
    """Errors cross process borders in servers and task queues."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_an_invalid_parameter_names_parameter_value_and_bound() -> None:
    error = InvalidParameter("epsilon", -1, "a finite number > 0")
    assert str(error) == "epsilon=-1 is not allowed: a finite number > 0"
    assert (error.parameter, error.value, error.bound) == ("epsilon", -1, "a finite number > 0")
    assert isinstance(error, ValueError)


def test_an_unknown_owners_message_is_a_sentence() -> None:
    assert str(UnknownOwner("the store holds no such owner")) == "the store holds no such owner"
    assert str(UnknownOwner()) == ""


def test_errors_after_the_charge_are_constant() -> None:
    assert str(ReleaseFailed()) == str(ReleaseFailed())
    assert "charge stands" in str(ReleaseFailed())
    assert "charged" in str(MembersAbstained())
    for kind in (ReleaseFailed, MembersAbstained, ShutWithinCall):
        with pytest.raises(TypeError):
            kind("a private text")  # type: ignore[call-arg]

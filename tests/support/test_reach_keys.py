"""Code that depends on other state has another key, however it gets at the state."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import operator
import os
import sys
import types
import weakref
from collections import UserDict
from os import getenv
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gact_graph.support import objects, reach
from gact_graph.support.reach import Reach, Unknowable

FACTOR = {"of": 1.0}


class Layer(nn.Module):
    """Calls a function with itself and its state."""

    def __init__(self, function: Any, state: Any = None) -> None:
        super().__init__()
        self.function, self.state = function, state

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(self)


@pytest.fixture(autouse=True)
def no_known_names() -> None:
    """Names in the code of the other tests' layers, which are of one class."""
    reach._known_names.clear()


def key(layer: nn.Module) -> Any:
    return Reach([layer], frozenset({"forward"})).key


class Held:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get(self, *args: Any, **kwargs: Any) -> float:
        return self.factor

    def __str__(self) -> str:
        return f"{self.factor}"


class HeldInPrivate:
    __slots__ = ("__factor",)

    def __init__(self, factor: float) -> None:
        self.__factor = factor

    def get(self) -> float:
        return self.__factor


class Basis:
    def __new__(cls) -> Any:
        return super().__new__(cls)

    def __init__(self) -> None:
        self.factor = FACTOR["of"]


class Product:
    def __mul__(self, other: float) -> float:
        return other * FACTOR["of"]


@dataclasses.dataclass
class Derived:
    power: int = 1

    def __post_init__(self) -> None:
        self.factor = FACTOR["of"] ** self.power


def with_parameter(learns: bool) -> nn.Module:
    module = nn.Module()
    module.any = nn.Parameter(torch.ones(2), requires_grad=learns)
    return module


def on_a_tensor(factor: float) -> Tensor:
    made = torch.ones(2)
    made.factor = factor  # type: ignore[attr-defined]
    return made


class Mapped(UserDict[str, Any]):
    pass


def bare(has: bool) -> Any:
    made = argparse.Namespace()
    if has:
        made.factor = 1.0
    return made


factor_of = operator.attrgetter("state.factor")


called = operator.methodcaller("get", 1)
called_by_name = operator.methodcaller("get", name=1)

READERS = {
    "parameters": (lambda s: next(s.state.parameters()).requires_grad, with_parameter),
    "buffers": (lambda s: [*s.state.named_parameters()], with_parameter),
    "state_dict": (lambda s: s.state.state_dict(keep_vars=True), with_parameter),
    "hasattr": (lambda s: hasattr(s.state, f"fac{'tor'}"), bare),
    "a mapping of the user": (lambda s: s.state["any"], lambda on: Mapped({"any": on})),
    "a key of strings": (lambda s: ("a", "b") in s.state, lambda on: {("a", "bc"[on]): 1}),
    "a key of a set": (lambda s: len(s.state), lambda on: {frozenset("ab"[on]): 1}),
    "an attribute of a tensor": (lambda s: s.state.factor, on_a_tensor),
    "a private slot": (lambda s: s.state.get(), HeldInPrivate),
    "attrgetter": (lambda s: factor_of(s), Held),
    "attrgetter inside": (lambda s: operator.attrgetter("state.factor")(s), Held),
    "methodcaller": (lambda s: called(s.state), Held),
    "methodcaller with a name": (lambda s: called_by_name(s.state), Held),
    "str": (lambda s: str(s.state), Held),
    "an f-string": (lambda s: f"{s.state}", Held),
}


@pytest.mark.parametrize("name", READERS)
def test_state_in_an_attribute(name: str) -> None:
    reader, make = READERS[name]
    keys = [key(Layer(reader, make(on))) for on in (False, True, True)]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize(
    "reader",
    [
        lambda _: Basis().factor,
        lambda _: Derived().factor,
        lambda _: Product() * 2,
        lambda s: s.state().factor,
    ],
    ids=["made", "a dataclass", "an operator", "an attribute"],
)
def test_state_of_a_class_that_the_code_calls(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(reader, Basis)
    before = key(layer)
    assert before == key(layer)
    monkeypatch.setitem(FACTOR, "of", 2.0)
    assert key(layer) != before


def test_special_methods_beside_names_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(lambda s: s.state * getattr(s, f"{'training'}"), Product())
    before = key(layer)
    monkeypatch.setitem(FACTOR, "of", 2.0)
    assert key(layer) != before


def test_functions_of_the_standard_library_by_name() -> None:
    for function in (lambda _: getenv("FACTOR"), lambda _: os.getenv("FACTOR")):
        with pytest.raises(Unknowable, match="calls functions of the module os"):
            key(Layer(function))


def test_a_dataclass_can_be_compared() -> None:
    """Its ``__repr__`` calls functions of the standard library, but not those of messages."""
    reader = lambda s: f"{s.state}" and s.state.power  # noqa: E731
    assert key(Layer(reader, Derived(1))) != key(Layer(reader, Derived(2)))


def test_a_function_of_the_user_that_claims_to_be_of_a_library() -> None:
    @functools.wraps(torch.relu)
    def wrapper(layer: Any) -> float:
        return FACTOR["of"]

    wrapper.__module__ = "torch"
    before = key(Layer(wrapper))
    FACTOR["of"] = 3.0
    try:
        assert key(Layer(wrapper)) != before
    finally:
        FACTOR["of"] = 1.0


class Printing(nn.Module):
    def __init__(self) -> None:
        print("made")
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self, Printing)
        return super(Printing, self).__call__(x)  # noqa: UP008


def test_the_constructor_of_a_module_is_not_followed() -> None:
    key(Layer(Printing()))


class Kind(enum.Enum):
    PLAIN = 1

    @property
    def factor(self) -> float:
        return FACTOR["of"]


class Text(str):
    def scaled(self) -> float:
        return FACTOR["of"]


class Meta(type):
    @property
    def factor(cls) -> float:
        return FACTOR["of"]


class WithMeta(metaclass=Meta):
    pass


class Methods:
    def _scaled(self, power: int) -> float:
        return FACTOR["of"] ** power

    squared = functools.partialmethod(_scaled, 2)

    @functools.cached_property
    def once(self) -> float:
        return FACTOR["of"]

    @functools.singledispatchmethod
    def of(self, value: Any) -> float:
        return 1.0

    @of.register
    def _(self, value: int) -> float:
        return FACTOR["of"]


def imports_a_module(_: Any) -> Any:
    import a_module_of_the_user

    return a_module_of_the_user.factor


def imports_a_name(_: Any) -> Any:
    def inner() -> Any:
        from a_module_of_the_user import factor

        return factor

    return inner()


@pytest.mark.parametrize(
    "reader",
    [
        lambda s: s.kind.factor,
        lambda s: s.state.scaled(),
        lambda _: WithMeta.factor,
        lambda _: Methods().squared(),
        lambda _: Methods().once,
        lambda _: Methods().of(1),
    ],
    ids=["an enumeration", "a text", "a metaclass", "a partial method", "cached", "dispatched"],
)
def test_a_global_behind(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(reader, Text("a"))
    layer.kind = Kind.PLAIN  # type: ignore[assignment]
    before = key(layer)
    assert before == key(layer)
    monkeypatch.setitem(FACTOR, "of", 2.0)
    assert key(layer) != before


@pytest.mark.parametrize("kind", [Text, type("Int", (int,), {}), type("Float", (float,), {})])
def test_values_of_subclasses(kind: Any) -> None:
    def reader(layer: Any) -> Any:
        return layer.state.factor

    keys = []
    for value, factor in (("1", 1.0), ("1", 2.0), ("2", 1.0), ("1", 1.0)):
        state = kind(value)
        state.factor = factor
        keys.append(key(Layer(reader, state)))
    assert keys[0] == keys[3] and len({*map(str, keys[:3])}) == 3


@pytest.mark.parametrize("reader", [imports_a_module, imports_a_name])
def test_a_module_that_the_code_imports(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("a_module_of_the_user")
    module.factor = 1.0
    with pytest.raises(Unknowable, match="imports a_module_of_the_user while it runs"):
        key(Layer(reader))
    monkeypatch.setitem(sys.modules, "a_module_of_the_user", module)
    before = key(Layer(reader))
    module.factor = 2.0
    assert key(Layer(reader)) != before


def test_a_module_with_attributes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("a_module_of_the_user")

    def __getattr__(name: str) -> float:
        return FACTOR["of"]

    module.__getattr__ = __getattr__
    layer = Layer(lambda s: s.state.factor, module)
    before = key(layer)
    monkeypatch.setitem(FACTOR, "of", 2.0)
    assert key(layer) != before


def test_a_weak_dictionary() -> None:
    held = Held(1.0)
    weak = weakref.WeakKeyDictionary({held: 1.0})
    layer = Layer(lambda s: s.state[held], weak)
    before = key(layer)
    weak[held] = 2.0
    assert key(layer) != before


def test_functions_of_code_that_is_made() -> None:
    """As sympy.lambdify makes them: without a module, and all of one name."""

    def made(text: str) -> Any:
        namespace: dict[str, Any] = {"__builtins__": {}}
        exec(f"def made(layer):\n    return {text}", namespace)
        return namespace["made"]

    keys = [key(Layer(made(text))) for text in ("1.0", "2.0", "1.0")]
    assert keys[0] != keys[1] and keys[0] == keys[2]


def test_a_script_in_the_folder_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a worker of Ray, which runs code of the user as ``__main__``."""
    file, main = "/lib/site-packages/ray/worker.py", sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", file, raising=False)
    objects.is_library.cache_clear()
    try:
        assert not objects.is_library("__main__")
    finally:
        objects.is_library.cache_clear()

"""Layers whose messages change something outside of their attributes run as in PyG."""

from __future__ import annotations

import array
import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from blocked import Alone
from samples import graph
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, MessagePassing, MetaLayer

import gact_graph

X, EDGES = graph()
EXACT: dict[str, Any] = {
    "level": "lossless",
    "bits": 32,
    "adaptive": False,
    "blocks": 64,
    "min_bytes": 0,
}

CALLS = 0
LOG: list[int] = []


class Counter:
    calls = 0


class Slotted:
    __slots__ = ("calls",)


class PrivateCounter:
    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def count(self) -> int:
        self.__calls += 1
        return self.__calls


class Conv(MessagePassing):
    """Multiplies each message by the number of the call."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def count(self) -> float:
        raise NotImplementedError

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.count()


class InAnObject(Conv):
    def count(self) -> float:
        self.state.calls += 1
        return self.state.calls


class InAnObjectOfAnObject(Conv):
    def count(self) -> float:
        counter = self.state["deep"][0]
        setattr(counter, "calls", getattr(counter, "calls") + 1)  # noqa: B009, B010
        return counter.calls


class InAListOfAnObject(Conv):
    def count(self) -> float:
        self.state.calls.append(1)
        return len(self.state.calls)


class InNestedContainers(Conv):
    def count(self) -> float:
        self.state["a"]["b"]["c"][0] += 1
        return self.state["a"]["b"]["c"][0]


class InATensorOfAnObject(Conv):
    def count(self) -> float:
        self.state.calls += 1
        return self.state.calls.item()


class UnderANameThatIsMade(Conv):
    def count(self) -> float:
        setattr(self.state, f"of_{1}", getattr(self.state, f"of_{1}", 0) + 1)
        return getattr(self.state, f"of_{1}")


class OnATensor(Conv):
    def count(self) -> float:
        self.state.calls += 1
        return self.state.calls


class InAnArray(Conv):
    def count(self) -> float:
        self.state[0] += 1
        return float(self.state[0])


class InAClass(Conv):
    calls = 0

    def count(self) -> float:
        type(self).calls += 1
        return self.calls


class InAnotherClass(Conv):
    def count(self) -> float:
        Counter.calls += 1
        return Counter.calls


class InAGlobal(Conv):
    def count(self) -> float:
        global CALLS
        CALLS += 1
        return CALLS


class InAGlobalList(Conv):
    def count(self) -> float:
        LOG.append(1)
        return len(LOG)


def helper() -> int:
    helper.calls = getattr(helper, "calls", 0) + 1
    return helper.calls


class InAFunction(Conv):
    def count(self) -> float:
        return helper()


class InADefault(Conv):
    def count(self, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        return len(seen)


class InAProperty(Conv):
    @property
    def number(self) -> float:
        self.state.calls += 1
        return self.state.calls

    def count(self) -> float:
        return self.number


class Called(Conv):
    def count(self) -> float:
        return self.state()


class InAnIterator(Conv):
    def count(self) -> float:
        return next(self.state)


class Drawn(Conv):
    """Of a generator of random numbers in an attribute."""

    def count(self) -> float:
        if isinstance(self.state, torch.Generator):
            return torch.rand((), generator=self.state).item()
        return self.state.random()


def counter() -> Any:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Submodule(nn.Module):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        return x * self.counter.calls


def counting_tensor() -> Tensor:
    made = torch.zeros(3)
    made.calls = 0  # type: ignore[attr-defined]
    return made


def slotted() -> Slotted:
    made = Slotted()
    made.calls = 0
    return made


def holding(value: Any) -> Counter:
    made = Counter()
    made.calls = value
    return made


def edge_conv(inside: Any) -> MessagePassing:
    return EdgeConv(inside, aggr="sum")


def function() -> Any:
    count = counter()
    return lambda x: x * count()


LAYERS = {
    "an object": lambda: InAnObject(Counter()),
    "an object with slots": lambda: InAnObject(slotted()),
    "an object with a private slot": lambda: Called(PrivateCounter().count),
    "an object of an object": lambda: InAnObjectOfAnObject({"deep": [Counter()]}),
    "a list of an object": lambda: InAListOfAnObject(holding([])),
    "nested containers": lambda: InNestedContainers({"a": {"b": {"c": [0]}}}),
    "a tensor of an object": lambda: InATensorOfAnObject(holding(torch.zeros(()))),
    "a name that is made": lambda: UnderANameThatIsMade(Counter()),
    "an attribute of a tensor": lambda: OnATensor(counting_tensor()),
    "an array": lambda: InAnArray(np.zeros(1)),
    "bytes": lambda: InAnArray(bytearray(1)),
    "an array of Python's": lambda: InAnArray(array.array("d", [0])),
    "a class": InAClass,
    "another class": InAnotherClass,
    "a global": InAGlobal,
    "a global list": InAGlobalList,
    "a function": InAFunction,
    "a default": InADefault,
    "a property": lambda: InAProperty(Counter()),
    "a closure": lambda: Called(counter()),
    "a partial function": lambda: Called(functools.partial(counter())),
    "a bound method": lambda: Called(itertools.count(1).__next__),
    "an iterator": lambda: InAnIterator(iter(range(1, 1000))),
    "a generator function": lambda: InAnIterator(float(i) for i in range(1, 1000)),
    "torch's generator": lambda: Drawn(torch.Generator().manual_seed(0)),
    "NumPy's generator": lambda: Drawn(np.random.default_rng(0)),
    "NumPy's old generator": lambda: Drawn(np.random.RandomState(0)),
    "Python's generator": lambda: Drawn(random.Random(0)),
    "a submodule": lambda: edge_conv(Submodule(Counter())),
    "a submodule of a submodule": lambda: edge_conv(nn.Sequential(Submodule(Counter()))),
    "a function for a layer of PyG": lambda: edge_conv(function()),
}


def scaled(layer: nn.Module) -> nn.Module:
    """In a model with a parameter."""
    model = Alone(layer)
    model.scale = nn.Parameter(torch.ones(()))
    return model


def _forget() -> None:
    global CALLS
    CALLS, Counter.calls, InAClass.calls, helper.calls = 0, 0, 0, 0
    LOG.clear()
    InADefault.count.__defaults__[0].clear()  # type: ignore[index]


def _trained(name: str, **options: Any) -> tuple[list[Tensor], Any]:
    """Outputs and gradients of three steps, and the report."""
    _forget()
    model = scaled(LAYERS[name]())
    if options:
        gact_graph.wrap(model, **{"min_bytes": 0} | options)
    found = []
    for _ in range(3):
        x = X.clone().requires_grad_()
        out = model(x, EDGES)
        out.sin().sum().backward()
        found += [out.detach(), x.grad]
    return found, gact_graph.report(model) if options else None


@pytest.mark.parametrize("name", LAYERS)
def test_lossless_in_blocks(name: str) -> None:
    stock, _ = _trained(name)
    got, report = _trained(name, **EXACT)
    assert all(map(torch.equal, got, stock))
    [row] = report.layers
    assert row.way == "stock" and row.reason


@pytest.mark.parametrize("name", LAYERS)
def test_computed_again(name: str) -> None:
    stock, _ = _trained(name)
    got, _ = _trained(name, level="CB2", bits=32, adaptive=False)
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-4) for a, b in zip(got, stock, strict=True))


class Edges(nn.Module):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, source: Tensor, destination: Tensor, attr: Any, u: Any, batch: Any) -> Tensor:
        self.counter.calls += 1
        return (source - destination) * self.counter.calls


def test_an_edge_model_of_a_meta_layer() -> None:
    def run(**options: Any) -> list[Tensor]:
        model = scaled(MetaLayer(Edges(Counter())))
        if options:
            gact_graph.wrap(model, **{"min_bytes": 0} | options)
        return [model(X, EDGES)[1] for _ in range(3)]

    assert all(map(torch.equal, run(**EXACT), run()))


@pytest.mark.parametrize("where", ["a variable", "a list", "an object"])
def test_a_message_function(where: str) -> None:
    """Of :func:`gact_graph.message_passing`."""

    def run(blocks: Any) -> list[Tensor]:
        if where == "a variable":
            count = counter()
        elif where == "a list":
            seen: list[int] = []
            count = lambda: seen.append(1) or len(seen)  # noqa: E731
        else:
            state = Counter()
            state.calls = 0

            def count() -> int:
                state.calls += 1
                return state.calls

        return [
            gact_graph.message_passing(
                lambda x_i, x_j, edge_attr: x_j * count(), X, EDGES, blocks=blocks
            )
            for _ in range(3)
        ]

    stock = run(False)
    with pytest.warns(RuntimeWarning, match="at once, because its message function changes"):
        got = run(64)
    assert all(map(torch.equal, got, stock))


class Late(Conv):
    """Counts from its third call on: not when it is tried out."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.state.steps += 1
        return super().forward(x, edge_index)

    def count(self) -> float:
        if self.state.steps > 2:
            self.state.calls += 1
        return 1.0 + self.state.calls


def test_a_change_that_comes_later() -> None:
    def run(**options: Any) -> tuple[list[Tensor], int]:
        state = Counter()
        state.steps = 0
        model = scaled(Late(state))
        if options:
            gact_graph.wrap(model, **{"min_bytes": 0} | options)
        return [model(X, EDGES) for _ in range(5)], state.calls

    stock, calls = run()
    got, counted = run(**EXACT)
    assert counted == calls == 3
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, stock, strict=True))


class Quiet(Conv):
    """Names much, and changes nothing."""

    def count(self) -> float:
        return len(self.state.calls) + len(LOG) + Counter.calls + CALLS


def test_what_changes_nothing_runs_in_blocks() -> None:
    _forget()
    model = gact_graph.wrap(scaled(Quiet(holding(torch.ones(3)))), **EXACT)
    model(X, EDGES)
    [row] = gact_graph.report(model).layers
    assert row.way == "blocks", row.reason


def test_a_list_that_changes_before_backward() -> None:
    """The function runs again in backward, with what the list held in forward."""

    def run(blocks: Any) -> Tensor:
        scales, x = [2.0], X.clone().requires_grad_()
        out = gact_graph.message_passing(
            lambda x_i, x_j, edge_attr: (x_j * scales[0]).sin(), x, EDGES, blocks=blocks
        )
        scales[0] = 3.0
        out.sum().backward()
        return x.grad

    assert torch.allclose(run(64), run(False), atol=1e-5)


class Keeps(Conv):
    """Leaves its messages behind."""

    def __init__(self, where: str) -> None:
        super().__init__(Counter())
        self.where, self.weight = where, nn.Parameter(torch.ones(32))

    def message(self, x_j: Tensor) -> Tensor:
        if self.where == "an object":
            setattr(self.state, f"last_{self.where}", x_j.detach())
        else:
            self.weight.last = x_j.detach()  # type: ignore[attr-defined]
        return x_j.tanh()


@pytest.mark.parametrize("where", ["an object", "a tensor"])
def test_no_tensor_of_a_trace_is_left_behind(where: str) -> None:
    model = gact_graph.wrap(scaled(Keeps(where)), **EXACT)
    for _ in range(2):
        model(X, EDGES)
    [layer] = [m for m in model.modules() if isinstance(m, Keeps)]
    [left] = vars(layer.state if where == "an object" else layer.weight).values()
    assert type(left) is Tensor

"""A program trained stock, and the same wrapped: the results are equal, or both raise.

A program is Python source that defines ``build()``, which gives a model, and ``train(model,
record)``, which trains it and appends pairs of a name and a tensor to ``record``.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import gact_graph
from gact_graph.capture import recipes
from gact_graph.layers.recompute import contexts

Record = list[tuple[str, Tensor]]

EXAMPLES = int(os.environ.get("GACT_GRAPH_ATTACK", "0"))
"""How many programs a longer attack draws; 0 for the few that are the same at each run."""

# An order of sums changes the last bits of a float64 alone; a part of a gradient that is missing or
# wrong changes its first ones.
_ORDER = {torch.float64: 1e-9, torch.float32: 1e-3}
# At 16 bits an element is off by one part in 65,535 of the range of its group. What a program makes
# of that is measured beside it, by the same noise on all that stock autograd saves.
_NOISE, _TIMES_NOISE = 1e-2, 100.0

_STALE = "modified by an inplace operation"
"""Autograd's error for a saved tensor that has changed. An encoded copy has not."""

_UNSORTED = "tensor is not sorted"
"""The error of some aggregations. In blocks edges are sorted."""

_READ_AGAIN = re.compile(
    r"saved at \S+\.source, is at version|has other values than in forward|to leave its inputs as"
)
"""The errors where a tensor has changed that is read again, and stock reads it once."""


@dataclass(frozen=True)
class Setting:
    """How a model is wrapped, and how near to stock its results must come.

    Attributes:
        options: Of :func:`gact_graph.wrap`.
        bound: ``bits`` for the same bits, ``order`` for the same sums in another order, ``noise``
            for noise of 16 bits, ``finite`` for anything finite.
    """

    options: dict[str, Any]
    bound: str

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def ways(blocks: int | str | None) -> list[Setting]:
    """Every level, without blocks and with blocks of this size, unless that is None."""
    exact = {"bits": 32, "adaptive": False, "min_bytes": 0}
    coded = {"bits": 16, "adaptive": False, "min_bytes": 0}
    four = {"bits": 4, "min_bytes": 0}
    chosen = [
        Setting({"level": "L0"} | exact, "bits"),
        Setting({"level": "lossless"} | exact, "bits"),
        Setting({"level": "L1", "blocks": False} | exact, "bits"),
        Setting({"level": "L1", "blocks": False} | coded, "noise"),
        Setting({"level": "L2", "blocks": False} | coded, "noise"),
        Setting({"level": "L1", "blocks": False} | four, "finite"),
    ]
    if blocks is not None:
        chosen += [
            Setting({"level": "L0", "blocks": blocks} | exact, "order"),
            Setting({"level": "lossless", "blocks": blocks} | exact, "order"),
            Setting({"level": "CB2", "blocks": False} | exact, "order"),
            Setting({"level": "CB2", "blocks": blocks} | exact, "order"),
            Setting({"level": "L1", "blocks": blocks} | coded, "noise"),
            Setting({"level": "CB2", "blocks": False} | coded, "noise"),
            Setting({"level": "CB2", "blocks": blocks} | coded, "noise"),
            Setting({"level": "CB2", "blocks": blocks, "adaptive": False} | four, "finite"),
        ]
    return chosen


def second_ways(blocks: int | str | None) -> list[Setting]:
    """The levels under which derivatives of gradients are those of stock."""
    exact = {"bits": 32, "adaptive": False, "min_bytes": 0}
    chosen = [
        Setting({"level": "lossless"} | exact, "bits"),
        Setting({"level": "L1", "blocks": False} | exact, "bits"),
        Setting({"level": "CB2", "blocks": False} | exact, "order"),
    ]
    if blocks is not None:
        chosen += [
            Setting({"level": "lossless", "blocks": blocks} | exact, "order"),
            Setting({"level": "CB2", "blocks": blocks} | exact, "order"),
        ]
    return chosen


class Different(AssertionError):
    """A wrapped model differs from stock; the message holds the program."""


def check(source: str, settings_: list[Setting]) -> None:
    """Runs the program stock and with each setting.

    Raises:
        Different: At the first setting that gives something else.
    """
    with _torch_as_before():
        program = _load(source)
        stock, error = _run(program, None)
        noisy: Record | None = None
        for setting in settings_:
            if setting.bound == "noise" and noisy is None:
                noisy = _noisy(program)
            got, raised = _run(program, setting.options)
            problem = _compare(setting, stock, error, got, raised, noisy)
            if problem is not None:
                raise Different(f"{problem}\n\n{_standalone(source, setting)}")


def error_of(source: str) -> str | None:
    """The error that the program ends in, stock."""
    with _torch_as_before():
        return _run(_load(source), None)[1]


@contextmanager
def _torch_as_before() -> Iterator[None]:
    """One thread, torch's settings as they were, and nothing too small to be encoded."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with small_storages_count(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)


@contextmanager
def small_storages_count() -> Iterator[None]:
    """Storages of any size are encoded; otherwise most of a small model's would be kept."""
    least, inner = recipes.SMALL, contexts._LEAST_BYTES
    recipes.SMALL = 0
    contexts._LEAST_BYTES = 0
    try:
        yield
    finally:
        recipes.SMALL, contexts._LEAST_BYTES = least, inner


def _load(source: str) -> types.ModuleType:
    """The program as a module; PyG reads the source of layers, and asks for their module."""
    name = "attacking_program"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    sys.modules[name] = module
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


def _run(program: types.ModuleType, options: dict[str, Any] | None) -> tuple[Record, str | None]:
    """The record of the program, and the error that ended it."""
    record: Record = []
    torch.manual_seed(0)
    try:
        model = program.build()
        if options is not None:
            gact_graph.wrap(model, **options)
        program.train(model, record)
    except Exception as error:
        return record, f"{type(error).__name__}: {error}"
    record.append(("the random state", torch.get_rng_state()))
    return record, None


def _noisy(program: types.ModuleType) -> Record:
    """Stock, with noise of 16 bits on all that autograd saves but parameters."""
    generator = torch.Generator().manual_seed(0)

    def pack(tensor: Tensor) -> Tensor:
        plain = tensor.layout == torch.strided and tensor.is_floating_point()
        if not plain or tensor.numel() == 0 or isinstance(tensor, nn.Parameter):
            return tensor
        finite = tensor.detach().masked_fill(~tensor.isfinite(), 0.0)
        step = (finite.max() - finite.min()) / 65535
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
        return (tensor.detach() + step * noise).to(tensor.dtype)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return _run(program, None)[0]


def _compare(
    setting: Setting,
    stock: Record,
    error: str | None,
    got: Record,
    raised: str | None,
    noisy: Record | None,
) -> str | None:
    """Return the difference, or None."""
    if error is not None and raised is None:
        fine = _STALE in error or ("blocks" in setting.options and _UNSORTED in error)
        return None if fine else f"does not raise, and stock does: {error}"
    if raised is not None and _READ_AGAIN.search(raised):
        return None
    if error is not None and len(got) < len(stock):
        return f"raises before stock does: {raised}"
    if error is None and raised is not None:
        return f"raises, and stock does not: {raised}"
    if raised is None and [name for name, _ in got] != [name for name, _ in stock]:
        return f"gives {[name for name, _ in got]}, and stock {[name for name, _ in stock]}"
    scale = max((_norm(t) for _, t in stock if t.is_floating_point()), default=0.0)
    for i, ((name, expected), (_, value)) in enumerate(zip(stock, got, strict=False)):
        beside = noisy[i][1] if noisy is not None and i < len(noisy) else None
        problem = _differs(name, setting.bound, expected, value, beside, scale)
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _differs(
    name: str, bound: str, expected: Tensor, value: Tensor, beside: Tensor | None, scale: float
) -> str | None:
    if name == "the random state" and bound not in ("bits", "order"):
        return None  # RReLU draws as many numbers as elements are negative
    if expected.shape != value.shape or expected.dtype != value.dtype:
        return f"{value.dtype} {[*value.shape]} for {expected.dtype} {[*expected.shape]}"
    if bound == "bits" or not (expected.is_floating_point() or expected.is_complex()):
        same = torch.equal(_bits(expected), _bits(value))
        return None if same else f"not the same bits: {_distance(expected, value)}"
    finite = expected.isfinite()
    if not torch.equal(finite, value.isfinite()):
        if bound == "finite" or (beside is not None and not torch.equal(finite, beside.isfinite())):
            few = int((finite & ~value.isfinite()).sum())
            return f"{few} elements are not finite" if few and bound == "finite" else None
        return "finite elsewhere"
    if bound == "finite":
        return None
    a, b = value[finite], expected[finite]
    size, off = _norm(b), _norm(a - b)
    if bound == "order":
        most = _ORDER.get(expected.dtype, 1e-1) * (size + scale * 0.1)
    else:
        most = _NOISE * size + 1e-7 * scale
        if beside is not None:
            most += _TIMES_NOISE * _norm(beside[finite] - b)
    # An overflow of the norm itself is no difference.
    return f"off by {off:.2e} of {size:.2e}" if off > most else None


def _norm(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(tensor.detach().to(wide).norm())


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, with one NaN for all."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if plain.is_floating_point():
        plain = plain.nan_to_num(nan=1.2345, posinf=torch.inf, neginf=-torch.inf)
    return plain.detach()


def _distance(expected: Tensor, value: Tensor) -> str:
    if not (expected.is_floating_point() or expected.is_complex()):
        return "other values"
    return f"off by {_norm(value - expected):.2e} of {_norm(expected):.2e}"


def _standalone(source: str, setting: Setting) -> str:
    """Return the program as a script."""
    return source + textwrap.dedent(f"""

    import gact_graph
    from gact_graph.capture import recipes
    from gact_graph.layers.recompute import contexts
    recipes.SMALL = contexts._LEAST_BYTES = 0  # encode storages of any size
    torch.set_num_threads(1)
    runs = []
    for options in (None, dict({setting})):
        torch.manual_seed(0)
        model, record = build(), []
        if options is not None:
            gact_graph.wrap(model, **options)
        try:
            train(model, record)
        except Exception as error:
            print(options, repr(error))
        runs.append(record)
    for (name, stock), (_, wrapped) in zip(*runs):
        print(name, float((stock - wrapped).abs().max()) if stock.numel() else "empty")
    """)


def amount(few: int, many: int) -> int:
    """``few``, or ``many`` in a longer attack."""
    return many if EXAMPLES else few


def how_many(few: int) -> Callable[[Any], Any]:
    """Hypothesis' settings: ``few`` programs, the same at each run, or those of a longer attack."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

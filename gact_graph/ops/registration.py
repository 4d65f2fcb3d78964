"""Registration of operators with PyTorch: one declaration, and one implementation for each device.

A function in pure torch declares an operator. Its signature is the schema, and its body serves
every device for which there is no kernel:

>>> @operator(mutates=("out",), shapes="x: N W, places: E < N, starts: R + 1, out: R W")
... def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None: ...

defines ``gact_graph::segment_sum(Tensor(a0!) out, Tensor x, Tensor places, Tensor starts) -> ()``.
A kernel for the CPU is registered in C++ by ``STABLE_TORCH_LIBRARY_IMPL``, without a schema;
kernels for CUDA are registered by :func:`implement_cuda`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from gact_graph.ops import cpu
from gact_graph.ops.shapes import Shapes
from gact_graph.support.torch_private import CPU_KEY, has_kernel

F = TypeVar("F", bound=Callable[..., Any])

# The pure-torch code of each operator, and the shapes of its arguments.
_operators: dict[str, tuple[Callable[..., Any], Shapes | None]] = {}


def operator(*, mutates: tuple[str, ...] = (), shapes: str | None = None) -> Callable[[F], F]:
    """Declare the operator of the decorated function's name and signature.

    The first call on CPU tensors builds or loads the compiled kernels. Later calls reach a kernel
    that exists without passing through Python. An operator that returns tensors, and whose function
    does not run on meta tensors, also needs ``torch.library.register_fake``.

    Args:
        mutates: The names of the tensors that the operator writes to.
        shapes: The shapes of the arguments, as for :class:`gact_graph.ops.shapes.Shapes`, which are
            checked before this function or a kernel of :func:`implement_cuda` runs. None if the
            function and the kernels check the arguments themselves.

    Returns:
        A decorator that returns a function which runs the pure-torch code.
    """

    def declare(function: F) -> F:
        name = f"{cpu.NAMESPACE}::{function.__name__}"
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=mutates))
        rules = None if shapes is None else Shapes(function, shapes)
        reference = function if rules is None else _checked(function, rules)
        _operators[function.__name__] = reference, rules

        @torch.library.impl(name, "default")
        def run(*args: Any) -> Any:
            # Reached on the CPU before the kernels are loaded, and by layouts that these refuse.
            if args[0].device.type == "cpu" and cpu.load() is not None and has_kernel(name, "CPU"):
                overload: Any = dispatched(reference)
                return overload.default.redispatch(CPU_KEY, *args)
            return reference(*args)

        return reference

    return declare


def _checked(function: F, shapes: Shapes) -> F:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        shapes.check(*args)
        return function(*args)

    return cast(F, run)


def implement_cuda(load: Callable[[torch.device], Any], kernels: type) -> None:
    """Register kernels for CUDA.

    Args:
        load: Returns an instance of ``kernels`` for a device; or None, in which case the pure-torch
            code runs.
        kernels: A class whose public methods have the names and signatures of operators.
    """
    for name in dir(kernels):
        if not name.startswith("_"):
            _implement(load, name)


def _implement(load: Callable[[torch.device], Any], name: str) -> None:
    reference, shapes = _operators[name]

    @torch.library.impl(f"{cpu.NAMESPACE}::{name}", "cuda")
    def run(*args: Any) -> Any:
        kernels = load(args[0].device)
        if kernels is None:
            return reference(*args)
        if shapes is not None:
            shapes.check(*args)
        return getattr(kernels, name)(*args)


def dispatched(reference: F) -> F:
    """Return the operator that a function declared, with the function's type.

    The operator selects the implementation by the device of its arguments.
    """
    return cast(F, getattr(getattr(torch.ops, cpu.NAMESPACE), reference.__name__))

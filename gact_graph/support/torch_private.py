"""The private names of PyTorch that the library uses, each under a name of its own.

PyTorch may change these names in any version, so no other module reaches them. For each there is a
test of its behavior in ``tests/support/test_torch_private.py``, which fails where a version of
PyTorch has changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _guards, overrides
from torch._C import _autograd, _functorch
from torch._C._dynamo import eval_frame
from torch._dynamo import source
from torch._subclasses import fake_tensor, functional_tensor
from torch.autograd import Variable, forward_ad
from torch.nn.modules import batchnorm
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch, _pytree

# Autograd.

graph_task_id: Callable[..., Any] = torch._C._current_graph_task_id
"""Return the number of the backward that runs on this thread; -1 outside of backward."""

running_node: Callable[..., Any] = torch._C._current_autograd_node
"""Return the node whose backward runs on this thread: sensitivities run it again."""

next_sequence_number: Callable[..., Any] = _autograd._get_sequence_nr
"""Return the sequence number of the next node of this thread: it marks where an operation began."""

saved_tensor_hooks: Callable[..., Any] = _autograd._top_saved_tensors_default_hooks
"""Return the innermost pack and unpack hooks, given False for those outside of a trace; or None."""

function_transform: Callable[..., Any] = _functorch.peek_interpreter_stack
"""Return the innermost transform of ``torch.func`` that runs, or None."""

is_batched: Callable[..., Any] = _functorch.is_legacy_batchedtensor
"""Return whether a gradient is a batch of gradients: ``is_grads_batched=True`` makes them."""

at_end_of_backward: Callable[..., Any] = Variable._execution_engine.queue_callback
"""Call a function when the backward that runs on this thread ends."""


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation runs."""
    return forward_ad._current_level >= 0


# Storages.

neg_view: Callable[..., Any] = torch._neg_view
"""Return a lazy view with the opposite sign: layouts with the bit of negation restore it."""


def holders_of(tensor: Tensor) -> int:
    """Return the number of holders of a tensor's storage, among them this function."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# Modules.


def has_global_hooks() -> bool:
    """Return whether hooks of all modules are registered."""
    return bool(modules._has_any_global_hook())


# Operators and modes.

function_mode: Callable[..., Any] = overrides._get_current_function_mode
"""Return the innermost mode of functions, or None."""

function_modes: Callable[..., Any] = overrides._get_current_function_mode_stack
"""Return the modes of functions of this thread, without those whose function runs."""

pop_function_mode: Callable[..., Any] = overrides._pop_mode
"""Remove the innermost mode of functions, while capture pauses."""

push_function_mode: Callable[..., Any] = overrides._push_mode
"""Add a mode of functions, when capture resumes."""

CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""The dispatch key of the CPU, to which operators redispatch once their kernels are loaded."""

has_kernel: Callable[..., Any] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Return whether an operator, by its name, has a kernel for a dispatch key, by its name."""

OpOverload = torch._ops.OpOverload
"""The type of operators in a traced graph, with a schema and tags."""

set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled
"""The function through which ``torch.no_grad`` passes, which modes and graphs see."""

DispatchMode = _python_dispatch.TorchDispatchMode
"""A mode that sees each operation below autograd."""

dispatch_modes: Callable[..., Any] = _python_dispatch._get_current_dispatch_mode_stack
"""Return the modes of this thread that see operations below autograd."""

without_modes: Callable[..., Any] = _python_dispatch._disable_current_modes
"""Disable all modes of this thread: a trace inside a trace must not be seen."""

without_functions: Callable[..., Any] = torch._C.DisableTorchFunction
"""Disable all modes of functions of this thread, and those of subclasses."""


@contextmanager
def outside_of_compilers() -> Iterator[None]:
    """Trace inside as if no compiler were tracing, whose modes and disabled hooks a trace takes."""
    before = _autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with _guards.tracing(None):
            yield
    finally:
        _autograd._saved_tensors_hooks_set_tracing(before)


# Fake tensors, which have sizes and no data.

FakeTensor = fake_tensor.FakeTensor
"""The tensors of a trace."""

FunctionalTensor = functional_tensor.FunctionalTensor
"""The tensors that functions get while AOTAutograd traces them, after the compiler has."""

TRACED_TENSORS: tuple[type, ...] = (FakeTensor, FunctionalTensor)
"""The tensors that functions get while a compiler, or AOTAutograd, traces them."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The mode in which operations run on fake tensors, with symbols as sizes."""

DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Raised for a size that depends on data, where sizes are no symbols."""

ConstantSource = source.ConstantSource
"""The origin of a fake tensor, whose name the symbols of its sizes get."""

# Nested arguments. `torch.utils._pytree` has no public form.

TreeSpec = _pytree.TreeSpec
"""The structure of nested tuples, lists and dicts."""

tree_flatten: Callable[..., Any] = _pytree.tree_flatten
"""Return the leaves and the structure of nested values."""

tree_leaves: Callable[..., Any] = _pytree.tree_leaves
"""Return the leaves of nested values."""

tree_map: Callable[..., Any] = _pytree.tree_map
"""Return nested values with a function applied to the leaves."""

tree_unflatten: Callable[..., Any] = _pytree.tree_unflatten
"""Return nested values from their leaves and structure."""

# Modules and compilers.

AnyBatchNorm = batchnorm._BatchNorm
"""The base class of all batch norms."""

OptimizedModule = torch._dynamo.OptimizedModule
"""The class of the results of ``torch.compile``."""

set_compiler: Callable[..., Any] = eval_frame.set_eval_frame
"""Set the compiler of frames on this thread, and return the one before; None for no compiler."""

not_compiled: Callable[..., Any] = torch._dynamo.eval_frame.skip_code
"""Exclude a code object from compilers, except where another function inlines the function."""

FUNCTORCH = "torch._functorch."
"""The prefix of the modules that define the autograd functions of compiled graphs."""


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces.

    The compiler of torch 2.10 takes ``torch.compiler.is_exporting`` for true, whatever it traces.
    """
    return torch.compiler._is_exporting_flag


def compilation() -> Any:
    """Return the object that stands for the graph that a compiler traces now; None outside."""
    return _guards.TracingContext.try_get()


nonstrict_trace: Callable[..., Any] = torch._dynamo.nonstrict_trace
"""Exclude a function from compilers, which then trace the operators that it calls."""


def compiled_graphs() -> Any:
    """Return the graphs that AOTAutograd builds while it calls saved-tensor hooks; None outside.

    A dict with the ``_node`` of the saved tensor, the ``_fw_graph`` and the ``_bw_graph``.
    """
    # Not at the top: it imports 300 modules, which only compiled models need.
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    return _get_saved_tensor_hook_context()


def compiler_settings() -> Any:
    """Return the settings of AOTAutograd.

    Its ``joint_custom_pass`` changes the graph of forward and backward before they are parted.
    """
    from torch._functorch import config

    return config

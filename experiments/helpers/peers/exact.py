"""EXACT: the operations of a network in versions that keep two bits of what backward reads.

Linear layers keep their projected inputs, batch norm its input, both in two bits; ReLU, leaky ReLU
and dropout keep one bit an element; a sparse product keeps its matrix alone. The paper replaces
layers; here a mode replaces the operations that these layers call, so that any network will do.
What EXACT has no version of, the messages of attention first of all, stays as PyTorch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from experiments.helpers.peers.rows import Rows, pack_rows, projection
from gact_graph.ops.bitmask import pack_bits, unpack_bits

SHARE = 8
"""The width of rows over that of projected rows."""

Kept = tuple[tuple[Tensor, ...], Callable[..., Tensor]]
"""Tensors, and what makes of them the matrix that they stand for."""


class Exact(TorchFunctionMode):
    """EXACT's operations in place of PyTorch's, while it is entered.

    Args:
        device: Where the network is.
        block: Rows that share a range: 1 as EXACT has it; more is block-wise EXACT.
        seed: Of the noise and of the projections; torch's own generator is not drawn from.
    """

    def __init__(self, device: torch.device, block: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(seed)
        self._block = block

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        version = _VERSIONS.get(func)
        if version is None or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return version(self, *args, **(kwargs or {}))

    def keep(self, x: Tensor) -> Kept:
        """A matrix [N, W] in two bits an element."""
        shape = x.shape
        if self._block > 1:
            # The last block may lack some rows: its last element stands in for theirs.
            flat = x.reshape(-1)
            width = self._block * x.size(1)
            x = torch.cat([flat, flat[-1:].expand(-flat.numel() % width)]).view(-1, width)
        packed = pack_rows(x.float(), self.generator)
        width = packed.width

        def restore(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
            rows = Rows(codes, low, step, width).unpack()
            return rows.view(-1)[: shape.numel()].view(shape)

        return packed.tensors, restore

    def project(self, x: Tensor) -> Kept:
        """The same of its rows, made narrower by a random matrix."""
        matrix = projection(x.size(1), SHARE, self.generator, x.device)
        tensors, restore = self.keep(x @ matrix)
        return (*tensors, matrix), lambda *kept: restore(*kept[:-1]) @ kept[-1].T


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, mode: Exact, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tensors, ctx.restore = mode.project(x.reshape(-1, x.size(-1)))
        ctx.save_for_backward(weight, *tensors)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1))
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            None,
            grad @ weight if of_x else None,
            rows.T @ ctx.restore(*tensors) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: Exact,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor,
        bias: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        out, used_mean, used_scale = torch.native_batch_norm(
            x, weight, bias, mean, variance, True, momentum, eps
        )
        tensors, ctx.restore = mode.keep(x)
        ctx.eps = eps
        ctx.save_for_backward(weight, mean, variance, used_mean, used_scale, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, variance, used_mean, used_scale, *tensors = ctx.saved_tensors
        grads = torch.ops.aten.native_batch_norm_backward(
            *(grad, ctx.restore(*tensors), weight, mean, variance, used_mean, used_scale),
            *(True, ctx.eps, [True, True, True]),
        )
        return None, grads[0], None, None, grads[1], grads[2], None, None


class _Scaled(Function):
    """A product with a tensor of two values, ``low`` and ``high``, kept in one bit an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Tensor, low: float, high: float) -> Tensor:
        ctx.values = low, high
        ctx.save_for_backward(pack_bits(passed))
        return torch.where(passed, x * high, x * low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        low, high = ctx.values
        return grad * unpack_bits(words, grad.shape, low, high, grad.dtype), None, None, None


class _SparseProduct(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, x: Tensor) -> Tensor:
        ctx.matrix = matrix
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, torch.sparse.mm(ctx.matrix.t().to_sparse_csr(), grad)


def _linear(mode: Exact, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(mode, x, weight, bias)


def _addmm(
    mode: Exact, x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return beta * x + alpha * _Linear.apply(mode, left, right.T, None)


def _batch_norm(
    mode: Exact,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or x.dim() != 2:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return _BatchNorm.apply(mode, x, running_mean, running_var, weight, bias, momentum, eps)


def _leaky_relu(
    mode: Exact, x: Tensor, negative_slope: float = 0.01, inplace: bool = False
) -> Tensor:
    return _Scaled.apply(x, x > 0, negative_slope, 1.0)


def _dropout(
    mode: Exact, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(x, p, training)
    # Drawn as PyTorch draws it on a CPU, so that both drop the same elements.
    kept = torch.empty_like(x).bernoulli_(1 - p) > 0
    return _Scaled.apply(x, kept, 0.0, 1 / (1 - p))


def _sparse_product(mode: Exact, matrix: Tensor, x: Tensor, *reduce: str) -> Tensor:
    if matrix.layout != torch.sparse_csr or matrix.requires_grad or reduce:
        return torch.sparse.mm(matrix, x, *reduce)
    return _SparseProduct.apply(matrix, x)


_VERSIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.batch_norm: _batch_norm,
    F.relu: lambda mode, x, inplace=False: _leaky_relu(mode, x, 0.0),
    F.leaky_relu: _leaky_relu,
    F.dropout: _dropout,
    torch.sparse.mm: _sparse_product,
}

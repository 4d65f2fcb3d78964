"""Batch norm's backward and its reverse, in pure torch: see :mod:`gact_graph.ops.batch_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import check_tensor
from gact_graph.ops.registration import operator


@operator(
    mutates=("of_x",),
    shapes="x: N M, gradient: N M, of_x: N M",
)
def batch_norm_backward(of_x: Tensor, gradient: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
    """Write the gradient of the input into ``of_x``, which may be ``x`` itself.

    Args:
        of_x: The gradient of the input [N, M].
        gradient: The gradient of the result [N, M].
        x: The input [N, M].
        statistics: The mean of each column, 1 / sqrt(variance + eps), and that times the weight
            [3, M].

    Returns:
        The sums over rows of ``gradient``, and of ``(x - mean) * gradient`` [2, M].
    """
    check_tensor("statistics", statistics, x.dtype, [3, x.size(1)], x.device)
    mean, deviation, scale = statistics
    centered = x - mean
    sums = torch.stack([gradient.sum(0), (centered * gradient).sum(0)])
    of_bias, product = sums
    share = -scale / max(1, len(x))
    slope = share * deviation.square() * product
    torch.addcmul(share * of_bias, centered, slope, out=of_x).addcmul_(gradient, scale)
    return sums


@torch.library.register_fake("gact_graph::batch_norm_backward")
def _(of_x: Tensor, gradient: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
    return x.new_empty(2, x.size(1))


@operator(mutates=("x",), shapes="x: N M")
def restore_columns(x: Tensor, statistics: Tensor) -> None:
    """Give the columns of a matrix their mean and deviation, in place.

    Args:
        x: The matrix [N, M]. Its columns' present means are subtracted first.
        statistics: The mean of each column, and the factor of each column [2, M].
    """
    check_tensor("statistics", statistics, x.dtype, [2, x.size(1)], x.device)
    mean, deviation = statistics
    torch.addcmul(mean - x.mean(0) * deviation, x, deviation, out=x)

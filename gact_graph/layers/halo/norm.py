"""Batch norm over the nodes, or the edges, of all parts.

torch's SyncBatchNorm needs a GPU. This one runs on any device, with one collective in forward, for
the mean and the variance, and one in backward, of a few numbers per channel each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from gact_graph.layers.blocks.arguments import CannotBlock
from gact_graph.support.collective import collective
from gact_graph.support.patch import Patch
from gact_graph.support.torch_private import FakeTensor

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers whose forward :class:`WholeBatchNorm` replaces."""

_ROWS = 1 << 14
"""Rows that backward corrects at a time, to need no second tensor of the size of the input."""


class WholeBatchNorm(Patch):
    """Replace the forward of a batch norm; its statistics cover the rows of all parts.

    Each node and each edge is in one part. All processes run it at the same time, and have the same
    running statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "forward")

    def run(self, module: Any, /, input: Tensor) -> Tensor:
        """Run in place of the forward of ``module``."""
        if not module.training and module.running_mean is not None:
            return self.original(module)(input)
        if isinstance(input, FakeTensor):
            raise CannotBlock(f"takes a statistic over all edges ({type(module).__name__})")
        module._check_input_dim(input)
        momentum, mean, var = 0.0, None, None
        if module.training and module.track_running_stats:
            mean, var = module.running_mean, module.running_var
            module.num_batches_tracked.add_(1)
            momentum = module.momentum
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(module.num_batches_tracked)
        return batch_norm(input, mean, var, module.weight, module.bias, momentum, module.eps)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Apply :func:`torch.nn.functional.batch_norm` in training mode over the rows of all processes.

    Args:
        input: The rows of this process [n, C, ...]; n may be 0.
        running_mean: The running mean [C], updated in place.
        running_var: The running unbiased variance [C], updated in place.
        weight: [C].
        bias: [C].
        momentum: The weight of the new statistics in the running statistics.
        eps: Added to the variance.

    Raises:
        ValueError: All processes together have fewer than two rows.
    """
    # Function modes see one operation with the name of torch's operation.
    if has_torch_function_unary(input):
        others = running_mean, running_var, weight, bias, momentum, eps
        return handle_torch_function(batch_norm, (input,), input, *others)
    with torch.no_grad():
        mean, var, count = _moments(input)
        if count < 2:
            raise ValueError(
                "Expected at least two rows in all processes together, to normalize over (got "
                f"{count}); call model.eval(), or train on a larger graph"
            )
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        # The variance may exceed the largest number of float16.
        dtype = torch.promote_types(input.dtype if weight is None else weight.dtype, torch.float32)
        mean, var = mean.to(dtype), var.to(dtype)
    return _Normalize.apply(input, weight, bias, mean, var, count, eps)


def _moments(input: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance [C], float64, and the number of rows of all processes."""
    channels, count = input.size(1), input[:, :1].numel()
    own = input.new_zeros(2, channels, dtype=torch.float64)
    if count:
        wide = input.float() if input.element_size() < 4 else input
        own = torch.stack(torch.batch_norm_update_stats(wide, None, None, 0.0)).double()
    own = torch.cat([own.view(-1), own.new_tensor([count])])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with collective("exchange the statistics of a batch norm"):
        dist.all_gather(gathered, own)
    means, variances, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    # The mean of squares minus the square of the mean would cancel.
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, var, int(counts.sum())


class _Normalize(torch.autograd.Function):
    # Named as in PyTorch's own batch norm, so that capture compresses the same tensors.
    differentiates = "native_batch_norm", ("input", "weight", "result1", "result2")

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int,
        eps: float,
    ) -> Tensor:
        ctx.count, ctx.eps = count, eps
        ctx.save_for_backward(input, weight, mean, var)
        weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, gradient, _sum)

    @staticmethod
    def local_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Backward with the sums of this process, without the other processes."""
        return _gradients(ctx, gradient, lambda sums: None)


def _sum(sums: Tensor) -> None:
    with collective("sum the gradients of a batch norm"):
        dist.all_reduce(sums)


def _gradients(
    ctx: Any, gradient: Tensor, all_reduce: Callable[[Tensor], object]
) -> tuple[Tensor | None, ...]:
    input, weight, mean, var = ctx.saved_tensors
    weight = None if weight is None else weight.to(mean.dtype)
    if input.numel():
        # The gradient of the input for constant mean and variance; sums over the rows of the part.
        of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, input, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
    else:  # the operator divides by the number of rows
        of_input = torch.empty_like(input)
        of_weight = of_bias = torch.zeros_like(mean)
    if ctx.needs_input_grad[0]:
        sums = torch.stack([of_bias, of_weight])
        all_reduce(sums)
        shape = (1, -1, *[1] * (input.dim() - 2))
        root = (var + ctx.eps).rsqrt()
        scale = root if weight is None else root * weight
        shift, slope = (-scale * sums / ctx.count).to(of_input.dtype)
        slope = (slope * root).view(shape)
        mean = mean.view(shape)
        for rows, part in zip(input.split(_ROWS), of_input.split(_ROWS), strict=True):
            part.addcmul_(rows - mean, slope).add_(shift.view(shape))
    gradients = zip((of_input, of_weight, of_bias), ctx.needs_input_grad, strict=False)
    return *(tensor if needed else None for tensor, needed in gradients), *[None] * 4

"""Products of a sparse matrix and node tensors as weighted sums over sorted edges.

PyTorch transposes a sparse matrix in each backward, which sorts its entries: a third of a training
step of GCNII. Here they are sorted once. The rows are added up in another order than in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.order import Order, Orders
from gact_graph.layers.blocks.weighted_sum import can_sum, sum_edges, sum_products
from gact_graph.layers.recompute import runs
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.current import Product, capture_disabled, is_transformed
from gact_graph.support.storage import is_plain

_PRODUCTS = frozenset(
    {torch.sparse.mm, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
)


@dataclass(frozen=True)
class SparseProduct:
    """The product of a sparse matrix without a gradient and a dense one.

    Attributes:
        matrix: The sparse matrix [N, M], CSR.
        x: The dense matrix [M, W].
        mean: Whether each row is divided by the number of its entries.
        order: The entries from columns to rows.
    """

    matrix: Tensor
    x: Tensor
    mean: bool
    order: Order

    def run(self, product: Product | None = None) -> Tensor:
        """Return the result [N, W], with an autograd graph.

        Args:
            product: The product for which ``x`` stands, if ``x`` has no memory.
        """
        order, values = self.order, self.matrix.values()
        if self.mean:
            counts = order.starts.diff()
            values = values / counts.repeat_interleave(counts, output_size=len(values))
        if self.x.requires_grad and torch.is_grad_enabled():
            # Now, because in backward there is less memory left to sort the entries.
            _ = order.by_source
        result: Tensor = _Product.apply(self.x, self.matrix, values[:, None], order, False, product)
        return result


def sparse_product(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    orders: Orders,
    accepts: Callable[[int], bool] = lambda nbytes: True,
) -> SparseProduct | None:
    """Return the product that an operation computes; None for another operation.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        orders: A cache of sorted edges.
        accepts: Returns for the bytes of the dense matrix whether the product is wanted. Entries
            are sorted only if so.
    """
    if func not in _PRODUCTS or kwargs or len(args) not in (2, 3):
        return None
    matrix, x, *reduce = args
    mean = reduce == ["mean"]
    if not isinstance(matrix, Tensor) or not isinstance(x, Tensor) or reduce not in ([], ["mean"]):
        return None
    if type(matrix) is not Tensor or matrix.layout != torch.sparse_csr or not is_plain(x):
        return None
    if matrix.requires_grad or matrix.dim() != 2 or x.dim() != 2 or matrix.size(1) != x.size(0):
        return None
    values = matrix.values()
    if not can_sum(x) or values.dim() != 1 or values.dtype != x.dtype or not values.numel():
        return None
    if values.device != x.device or makes_messages(x.device):
        return None
    if torch.is_autocast_enabled(x.device.type) or is_transformed() or runs.current() is not None:
        return None
    if not accepts(x.nbytes):
        return None
    try:
        with capture_disabled():
            order = orders.of_matrix(matrix.crow_indices(), matrix.col_indices())
    except IndexError:
        return None  # PyTorch itself raises an error, or not
    return SparseProduct(matrix, x, mean, order) if order.num_sources <= len(x) else None


class _Product(torch.autograd.Function):
    # Named as in PyTorch's own product, so that capture counts the matrix alike.
    differentiates = "mm", ("self",)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        values: Tensor,
        order: Order,
        transposed: bool,
        product: Product | None,
    ) -> Tensor:
        """Return the product with x, or that of the transposed matrix, from its values [E, 1]."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(matrix)  # for the error if it changes in place
        ctx.values, ctx.order, ctx.transposed = values, order, transposed
        out = x.new_empty(matrix.size(1 if transposed else 0), x.size(1))
        if product is not None:
            sum_products(out, product, values, order)
        else:
            edges = order.by_source if transposed else order
            sum_edges(out, x, values, edges, order.num_edges)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (matrix,) = ctx.saved_tensors
        arguments = matrix, ctx.values, ctx.order, not ctx.transposed, None
        if gradients[0] is None:
            return (None,) * 6
        return _Product.apply(gradients[0].contiguous(), *arguments), *[None] * 5

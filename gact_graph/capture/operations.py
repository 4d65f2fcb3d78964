"""The table of what the backward of each operation reads of the tensors that it saved.

Autograd saves whole tensors. Some operations read no more of them than on which side of a bound
each element lies, or nothing at all. Others read values: noise that is zero on average does no harm
where the gradient is linear in them, and little where it is smooth and bounded. But what is divided
by, exponentiated or compared must be precise. Which is which follows from PyTorch's derivative
formulas (``derivatives.yaml``, which torch ships in ``torchgen``); the tests hold this file against
them. What is not listed here is kept exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gact_graph.capture.derivatives import POSITION, UNBOUNDED
from gact_graph.capture.trace import Call
from gact_graph.codecs.reads import (
    EXACT,
    RELATIVE,
    VALUES,
    Nothing,
    Reads,
    Side,
    Sign,
    Values,
)

WITHIN = "within"
"""The position of a tensor that an operation made for itself: no argument of it, and no result."""

# The gradient of these is linear in each tensor that they save.
LINEAR = frozenset(
    {
        *(
            "matmul",
            "rmatmul",
            "linalg_matmul",
            "mm",
            "bmm",
            "mv",
            "dot",
            "vdot",
            "inner",
            "outer",
            "ger",
            "kron",
        ),
        *("addmm", "addbmm", "baddbmm", "addmv", "addr", "linear", "bilinear", "einsum"),
        *("tensordot", "linalg_vecdot", "linalg_multi_dot", "chain_matmul", "linalg_cross"),
        *("conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("mul", "multiply", "rmul", "imul", "addcmul", "lerp"),
        # torch_sparse, pyg_lib
        *("spmm_sum", "spmm_mean", "segment_matmul", "grouped_matmul"),
    }
)

# Backward computes the scores from query and key once more, and their exponentials, while the
# normaliser is that of exact scores. At 16 bits an element is off by at most 1 / 65535 of its
# group's range, and a score by about 1e-5 of the largest that such elements can give. On average an
# exponential is off by half the square of that.
_SCORED = Values(least_bits=16)
# The gradient is linear in value and result. But where attention is sharp, backward subtracts a
# large number made from the one from a large number made from the other: their noise stays.
_ATTENDED = Values(least_bits=8)
# Backward multiplies two elements of the result, or squares one. The square of noise is not zero on
# average: it makes gradients of a softmax 8 % too small at 2 bits, and 0.3 % at 4 bits.
_SHARES = Values(least_bits=4)
# Shares sum to 1, and what is common to the gradients of a few large terms cancels by that. The
# noise of a few shares leaves it, where it may be far more than what is left; and they take little
# memory beside these terms.
_FEW_SHARES = Values(least_bits=16)
_NARROW = 16
_AGGREGATIONS = "torch_geometric.nn.aggr"

_GROUPS: tuple[tuple[Reads, str, str], ...] = (
    # The gradient is linear in what is read,
    (VALUES, "result", "exp exp2 expm1"),
    (VALUES, "tensor1", "addcdiv"),
    (VALUES, "weight", "embedding_bag"),
    (VALUES, "per_sample_weights", "embedding_bag"),
    (VALUES, "input", "grid_sample"),
    (VALUES, WITHIN, "rrelu"),
    # or reads its shape,
    (VALUES, "input", "gather take masked_select pad"),
    (VALUES, "input", "avg_pool1d avg_pool2d avg_pool3d"),
    (VALUES, "input", "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    # or it is smooth and bounded.
    (VALUES, "result", "elu celu"),
    (_SHARES, "result", "sigmoid special_expit tanh"),
    (VALUES, "input", "gelu silu mish softplus glu hardswish elu celu"),
    (VALUES, "input", "sin cos erf erfc atan arctan"),
    (Values(sign=True), "input", "selu"),
    (Values(sign=True), "result", "selu"),
    # It divides by what is read, or takes a power of it.
    (RELATIVE, "tensor2", "addcdiv"),
    (RELATIVE, "input", "log log2 log10"),
    (
        RELATIVE,
        "result",
        "sqrt rsqrt reciprocal tan rdiv log_softmax special_log_softmax",
    ),
    (RELATIVE, WITHIN, "rdiv"),
)

TABLE = {(name, position): reads for reads, position, names in _GROUPS for name in names.split()}
"""By the operation's name and the position, where neither depends on other arguments."""


def reads_of(call: Call, position: str) -> Reads:
    """What the backward of the operation reads of the tensor in this position.

    Args:
        call: The operation.
        position: An argument's name, ``result``, or :data:`WITHIN`.
    """
    # A layer that runs again in backward saves its inputs alone, and computes all else from them.
    if call.of_layer:
        return VALUES
    position = "input" if position == "self" else position
    if position == POSITION:
        return RELATIVE if call.name in UNBOUNDED else VALUES
    special = _SPECIAL.get(call.name)
    if special is not None:
        return special(call, position)
    if call.name in LINEAR:
        return VALUES
    return TABLE.get((call.name, position), EXACT)


def _batch_norm(call: Call, position: str) -> Reads:
    if position != "input":
        return EXACT
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.dim() < 2:
        return VALUES
    return _in_slices(x, (x.size(0), x.size(1), x[0, 0].numel()), (0, 2))


def _rms_norm(call: Call, position: str) -> Reads:
    return RELATIVE if position == WITHIN else _layer_norm(call, position)


def _layer_norm(call: Call, position: str) -> Reads:
    x, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
    return _in_rows(x, math.prod(shape)) if position == "input" else EXACT


def _group_norm(call: Call, position: str) -> Reads:
    if position == "weight":
        return VALUES
    x, groups = call.argument(0, "input"), call.argument(1, "num_groups")
    return _in_rows(x, x[0].numel() // groups) if position == "input" and len(x) else EXACT


def _instance_norm(call: Call, position: str) -> Reads:
    x = call.argument(0, "input")
    return _in_rows(x, x[0, 0].numel()) if position == "input" and x.numel() else EXACT


def _in_rows(x: Tensor, size: int) -> Reads:
    return _in_slices(x, (x.numel() // size, size), (1,)) if size else VALUES


def _in_slices(x: Tensor, shape: tuple[int, ...], dims: tuple[int, ...]) -> Values:
    """Values in slices; plain ones where memory has the elements in another order."""
    return Values(slices=(shape, dims)) if x.is_contiguous() and x.numel() else VALUES


def _variance(call: Call, position: str) -> Reads:
    """The gradient is linear in the input less its mean."""
    if position != "input":
        return RELATIVE if position == "result" and call.name in ("std", "std_mean") else EXACT
    x, dims = call.argument(0, "input", "self"), call.argument(1, "dim")
    if dims is None or isinstance(dims, bool) or not isinstance(x, Tensor) or not x.dim():
        return VALUES
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return _in_slices(x, tuple(x.shape), tuple(sorted(d % x.dim() for d in dims)) or (0,))


def _product(call: Call, position: str) -> Reads:
    if position in call.made:
        return VALUES
    squared = len(call.args) == 2 and call.args[0] is call.args[1]
    if squared:
        return _square(call, position)
    x, other = call.argument(0, "input", "self"), call.argument(1, "other")
    if position == "other":
        x, other = other, x
    return _in_columns(x) if _is_of_channels(other, x) else VALUES


def _is_of_channels(vector: object, x: object) -> bool:
    """Whether x is multiplied by a number for each channel, as norms do with what they learn.

    Each of these has a gradient of its own, and the channels may have any scales.
    """
    if not isinstance(vector, Tensor) or not isinstance(x, Tensor) or x.dim() < 2:
        return False
    return vector.dim() == 1 and vector.numel() == x.size(-1) >= _NARROW


def _square(call: Call, position: str) -> Reads:
    """Squares are mostly summed to the variance of channels, which are then divided by it."""
    reads = _in_columns(call.argument(0, "input", "self"))
    # PyG takes a variance as the mean of squares less the square of the mean: the noise of both
    # stays.
    of_variance = call.home.startswith(_AGGREGATIONS)
    return dataclasses.replace(reads, least_bits=16) if of_variance else reads


def _quotient(call: Call, position: str) -> Reads:
    """Mostly channels over their deviations. Narrow tensors are others, such as attention heads."""
    if position == "other":
        return RELATIVE
    x = call.argument(0, "input", "self")
    narrow = not isinstance(x, Tensor) or not x.dim() or x.size(-1) < _NARROW
    return VALUES if narrow else _in_columns(x)


def reads_of_source(reads: Reads, source: Tensor) -> Reads:
    """What is read of a tensor, where this is read of rows that are gathered from it."""
    if not isinstance(reads, Values) or reads.slices is None:
        return reads
    shape, dims = reads.slices
    if dims == (0,) and source.dim() and source.size(-1) == shape[-1]:
        return dataclasses.replace(reads, slices=_in_columns(source).slices)
    return dataclasses.replace(reads, slices=None)


def _in_columns(x: object) -> Values:
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel():
        return VALUES
    return _in_slices(x, (x.numel() // x.size(-1), x.size(-1)), (0,))


def _softmax(call: Call, position: str) -> Reads:
    if position != "result":
        return EXACT
    x, dim = call.argument(0, "input", "self"), call.argument(1, "dim")
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not x.dim():
        return _SHARES
    return _FEW_SHARES if x.size(dim) < _NARROW else _SHARES


def _norm(call: Call, position: str) -> Reads:
    """The gradient of the 2-norm is linear in input / result; that of the 1-norm reads the sign."""
    power = call.argument(1, "p", "ord", default=2)
    if power is None or power == "fro":
        power = 2
    if position == "input" and power in (1, 2):
        return VALUES if power == 2 else Sign()
    return RELATIVE if position == "result" and power == 2 else EXACT


def _normalize(call: Call, position: str) -> Reads:
    euclidean = call.argument(1, "p", default=2) == 2
    x, dim = call.argument(0, "input"), call.argument(2, "dim", default=1)
    if position != "input" or not euclidean:
        return EXACT
    return _in_slices(x, tuple(x.shape), (dim % x.dim(),)) if isinstance(dim, int) else VALUES


def _power(call: Call, position: str) -> Reads:
    """The gradient ``exponent * x ** (exponent - 1)`` is linear in x if the exponent is 2."""
    exponent = call.argument(1, "exponent")
    if position != "input" or isinstance(exponent, Tensor):
        return EXACT
    return _square(call, position) if exponent == 2 else RELATIVE


def _distance(call: Call, position: str) -> Reads:
    at = 2 if call.name == "dist" else 1
    if call.argument(at, "p", default=2) != 2 or position == WITHIN:
        return EXACT
    return RELATIVE if position == "result" else VALUES


def _attention(call: Call, position: str) -> Reads:
    """A fused kernel recomputes the exponentials in backward; separate ones save the softmax."""
    if _is_plain_attention(call):
        # What is saved are scaled query and key and the softmax: backward multiplies them.
        return _ATTENDED
    if position in ("query", "key"):
        return _SCORED
    return _ATTENDED if position in ("value", "result") else EXACT


def _is_plain_attention(call: Call) -> bool:
    """Whether PyTorch computes a softmax and two products, as with dropout on a CPU."""
    query, key, value = (call.argument(i, n) for i, n in enumerate(("query", "key", "value")))
    options = {
        "attn_mask": call.argument(3, "attn_mask"),
        "dropout_p": call.argument(4, "dropout_p", default=0.0),
        "is_causal": call.argument(5, "is_causal", default=False),
        "scale": call.argument(6, "scale"),
        "enable_gqa": call.argument(7, "enable_gqa", default=False),
    }
    choice = torch._fused_sdp_choice(query, key, value, **options)
    return bool(choice == SDPBackend.MATH.value)


def _relu(call: Call, position: str) -> Reads:
    return Side("not_at_most", (0.0,), 0.0, 1.0)


def _leaky_relu(call: Call, position: str) -> Reads:
    return Side("above", (0.0,), 0.0, 1.0)


def _threshold(call: Call, position: str) -> Reads:
    bound = call.argument(1, "threshold")
    if _is_rounded(call, bound):
        return EXACT
    return Side("not_at_most", (bound,), -math.inf, math.inf)


def _prelu(call: Call, position: str) -> Reads:
    return Values(sign=True) if position == "input" else VALUES


def _abs(call: Call, position: str) -> Reads:
    return Sign()


def _relu6(call: Call, position: str) -> Reads:
    return Side("strictly_within", (0.0, 6.0), 0.0, 3.0)


def _hardtanh(call: Call, position: str) -> Reads:
    low = float(call.argument(1, "min_val", default=-1.0))
    high = float(call.argument(2, "max_val", default=1.0))
    if _is_rounded(call, low, high):
        return EXACT
    return Side("strictly_within", (low, high), low, _between(low, high))


def _between(low: float, high: float) -> float:
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    if math.isfinite(low):
        return low + max(1.0, abs(low))
    return high - max(1.0, abs(high)) if math.isfinite(high) else 0.0


def _is_rounded(call: Call, *bounds: float) -> bool:
    """Whether the tensor's type cannot hold the bounds: kernels then compare with other ones."""
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.tensor(bounds, dtype=x.dtype, device="cpu").tolist() != [float(b) for b in bounds]


def _clamp(call: Call, position: str) -> Reads:
    return _within(call.argument(1, "min"), call.argument(2, "max"))


def _clamp_min(call: Call, position: str) -> Reads:
    return _within(call.argument(1, "min"), None)


def _clamp_max(call: Call, position: str) -> Reads:
    return _within(None, call.argument(1, "max"))


def _within(low: object, high: object) -> Reads:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return EXACT  # saved beside the bounds, and compared with them
    bounds = (
        -math.inf if low is None else float(low),  # type: ignore[arg-type]
        math.inf if high is None else float(high),  # type: ignore[arg-type]
    )
    # NaN is decoded for elements outside, as it lies within no bounds; a bound for those inside.
    inside = bounds[0] if math.isfinite(bounds[0]) else bounds[1]
    return Side("within", bounds, math.nan, inside)


def _reduction(call: Call, position: str) -> Reads:
    """``scatter_reduce`` and ``segment_reduce`` save all arguments, whatever the reduction is."""
    if position in ("index", "lengths", "offsets", "indices"):
        return VALUES
    reduce = call.argument(4 if call.name == "scatter_reduce" else 1, "reduce")
    return Nothing() if reduce in ("sum", "mean") else EXACT


def _sparse_mm(call: Call, position: str) -> Reads:
    """``torch.sparse.mm`` with a reduction saves the dense operand for the values' gradient."""
    sparse, dense = call.argument(0, "sparse", "input"), call.argument(1, "dense", "mat2")
    if len(call.args) + len(call.kwargs) < 3 or not isinstance(sparse, Tensor):
        return VALUES
    if sparse.requires_grad or not isinstance(dense, Tensor):
        return VALUES
    return Nothing() if call.position_of(dense) == position else VALUES


_SPECIAL: dict[str, Callable[[Call, str], Reads]] = {
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "var": _variance,
    "var_mean": _variance,
    "std": _variance,
    "std_mean": _variance,
    "square": _square,
    **dict.fromkeys(("softmax", "special_softmax"), _softmax),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), _quotient),
    "mul": _product,
    "scaled_dot_product_attention": _attention,
    "pow": _power,
    "float_power": _power,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "threshold": _threshold,
    "prelu": _prelu,
    "abs": _abs,
    "absolute": _abs,
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "scatter_reduce": _reduction,
    "segment_reduce": _reduction,
    "sparse_mm": _sparse_mm,
    "ipow": _power,
    "normalize": _normalize,
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_matrix_norm": _norm,
    "linalg_vector_norm": _norm,
    "dist": _distance,
    "pdist": _distance,
}

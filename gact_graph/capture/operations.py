"""The parts of saved tensors that the backward of each operation reads.

Autograd saves whole tensors. Some operations read only on which side of a bound each element lies,
or nothing. Others read values: noise of mean zero is harmless where the gradient is linear in them,
and nearly so where it is smooth and bounded. Divisors, exponents and compared values must be
precise. All this follows from PyTorch's derivative formulas (``derivatives.yaml``, which torch
ships in ``torchgen``), whose names of operations and tensors the table uses; tests check this file
against them. Tensors that are not listed are kept exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gact_graph.capture.derivatives import POSITION, UNBOUNDED
from gact_graph.capture.nodes import Attribute
from gact_graph.capture.sides import find_tests
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
from gact_graph.codecs.slices import FEW

# The gradient of these is linear in each tensor that they save.
LINEAR = frozenset(
    {
        *("mm", "bmm", "mv", "dot", "vdot", "addmm", "addbmm", "baddbmm", "addmv", "addr"),
        *("linear", "matmul", "trilinear", "convolution", "linalg_cross"),
        *("mul", "addcmul", "lerp", "sparse_addmm"),
    }
)

# Backward recomputes the scores from query and key, and their exponentials, but the normalizer is
# that of exact scores. At 16 bits the error of an element is at most 1 / 65535 of its group's range
# and that of a score about 1e-5 of the largest possible score. The mean error of an exponential is
# half the square of that.
_SCORED = Values(least_bits=16)
# The gradient is linear in value and result. But where attention is sharp, backward subtracts large
# numbers that are computed from them: the numbers cancel, and their noise does not.
_ATTENDED = Values(least_bits=8)
# Backward multiplies two elements of the result, or squares an element. The mean of squared noise
# is not zero: it makes gradients of a softmax 8 % too small at 2 bits, and 0.3 % at 4 bits.
_SHARES = Values(least_bits=4)
# Shares sum to 1, so the common part of the gradients of a few large terms cancels. With noise in a
# few shares it does not, and may exceed the rest by far; such shares take little memory.
_FEW_SHARES = Values(least_bits=16)
# An edge_update of a few numbers for each node computes exponentials of scores again. The mean of
# exp(noise) is not 1: at 2 bits it moved the gradient of a GAT by 40 % (amazon_computers); at 8
# bits no bias was left above the error of the estimate. Such scores take little memory.
_NODE_SCORES = Values(least_bits=8)
NARROW = 16
"""Rows of fewer elements are narrow: scores and shares of attention heads."""

_AGGREGATIONS = "torch_geometric.nn.aggr"

_GROUPS: tuple[tuple[Reads, str, str], ...] = (
    # A softmax in several operations saves the exponentials for exp and for a quotient, and
    # backward multiplies both. Two decodings would have no bias but six times the variance: with
    # one, errors cancel, as those of a softmax do.
    (_SHARES, "result", "exp exp2"),
    # The gradient is linear in the tensor,
    (VALUES, "result", "expm1"),
    (VALUES, "tensor1", "addcdiv"),
    (VALUES, "weight", "embedding_bag native_group_norm prelu_kernel"),
    (VALUES, "per_sample_weights", "embedding_bag"),
    (VALUES, "input", "grid_sampler2d"),
    (VALUES, "noise", "rrelu_with_noise"),
    # or depends on its shape,
    (VALUES, "self", "gather take masked_select"),
    (VALUES, "self", "reflection_pad1d reflection_pad2d reflection_pad3d"),
    (VALUES, "self", "replication_pad1d replication_pad2d replication_pad3d"),
    (VALUES, "self", "avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d"),
    # or is smooth and bounded.
    (VALUES, "self", "celu gelu silu mish softplus hardswish sin cos erf erfc atan"),
    (VALUES, "result", "celu"),
    (_SHARES, "result", "sigmoid tanh"),
    # Backward multiplies one half by the derivative of the other: at 2 bits, 8 to 12 % of bias.
    (_NODE_SCORES, "self", "glu"),
    (Values(sign=True), "self", "prelu_kernel"),
    # Backward divides by the tensor, or takes a power of it.
    (RELATIVE, "tensor2", "addcdiv"),
    (RELATIVE, "self", "log log2 log10"),
    (RELATIVE, "other", "div"),
    (RELATIVE, "result", "sqrt rsqrt reciprocal tan log_softmax std"),
    (RELATIVE, "result0", "std_mean"),
)

TABLE = {(name, tensor): reads for reads, tensor, names in _GROUPS for name in names.split()}
"""By operation and tensor, where the entry does not depend on other arguments."""

ALIKE: Mapping[str, Reads] = {
    **dict.fromkeys(LINEAR, VALUES),
    "abs": Sign(),
    # Operations of torch_sparse and pyg_lib, whose nodes show nothing.
    **dict.fromkeys(("spmm_sum", "spmm_mean", "segment_matmul", "grouped_matmul"), VALUES),
    # In place on a view, where the node shows nothing either.
    "imul": VALUES,
}
"""By operation, where backward reads the same part of all tensors that it saves."""


def reads_of(call: Call, position: str, tensor: Tensor, saved: Attribute | None) -> Reads:
    """Return the part of a tensor that backward reads.

    Args:
        call: The operation that saved it, as Python called it: it may consist of several.
        position: The tensor's position in the call.
        tensor: The tensor.
        saved: Its attribute of the autograd node; None if no node shows it.
    """
    # A layer that runs again in backward saves only its inputs.
    if call.of_layer:
        narrow = tensor.dim() > 1 and tensor[:1].numel() < NARROW
        return _NODE_SCORES if narrow and call.name == "edge_updater" else VALUES
    if position in call.tensors:
        return RELATIVE if position == POSITION and call.name in UNBOUNDED else VALUES
    if saved is None:
        return _alike(call.name)
    rule = _COMPOSITES.get(call.name) or _RULES.get(saved.operation)
    if rule is not None:
        return rule(call, saved, tensor)
    key = saved.operation, saved.name
    return TABLE.get(key) or _alike(saved.operation)


def _alike(operation: str) -> Reads:
    """Return the part of every tensor that an operation saves."""
    if operation in ("relu", "leaky_relu"):
        return _side(operation, (0.0,), 0.0, 1.0)
    return ALIKE.get(operation, EXACT)


def _side(operation: str, bounds: tuple[float | None, ...], low: float, high: float) -> Reads:
    test = find_tests().get(operation)
    return EXACT if test is None else Side(test, bounds, low, high)


_Rule = Callable[[Call, Attribute, Tensor], Reads]


def _attention(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if not saved.operation.startswith("scaled_dot_product"):
        # Separate kernels save scaled query and key and the softmax, which backward multiplies. A
        # fused kernel recomputes the exponentials.
        return _ATTENDED
    if saved.name in ("query", "key"):
        return _SCORED
    return _ATTENDED if saved.name in ("value", "output", "out") else EXACT


def _rms_norm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    shape = call.argument(1, "normalized_shape")
    if x.shape == call.argument(0, "input").shape:
        return _in_rows(x, math.prod(shape))
    return RELATIVE if x.shape[x.dim() - len(shape) :].numel() == 1 else EXACT


def _normalize(call: Call, saved: Attribute, x: Tensor) -> Reads:
    euclidean, dim = call.argument(1, "p", default=2) == 2, call.argument(2, "dim", default=1)
    if not euclidean or saved.name != "self" or saved.operation == "clamp_min":
        return EXACT
    return _scaled(x, _dims_of(x, (dim,))) if isinstance(dim, int) else VALUES


# By the function that is called, where its operations together allow more than each of them.
_COMPOSITES: dict[str, _Rule] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "normalize": _normalize,
}


def _batch_norm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.name != "input":
        return EXACT
    return _in_slices(x, (x.size(0), x.size(1), x[0, 0].numel()), (0, 2)) if len(x) else VALUES


def _layer_norm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.name != "input":
        return EXACT
    return _in_rows(x, math.prod(saved.setting("normalized_shape")))


def _group_norm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.name != "input" or not len(x):
        return TABLE.get((saved.operation, saved.name), EXACT)
    return _in_rows(x, x[0].numel() // saved.setting("group"))


def _in_rows(x: Tensor, size: int) -> Reads:
    return _in_slices(x, (x.numel() // size, size), (1,)) if size else VALUES


def _in_slices(x: Tensor, shape: tuple[int, ...], dims: tuple[int, ...]) -> Values:
    """Return values in slices, or plain values if memory has the elements in another order."""
    return Values(slices=(shape, dims)) if x.is_contiguous() and x.numel() else VALUES


def _variance(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """The gradient is linear in the input minus its mean."""
    if saved.name != "self":
        return TABLE.get((saved.operation, saved.name), EXACT)
    dims = saved.setting("dim")
    if dims is None or not x.dim():
        return VALUES
    return _in_slices(x, tuple(x.shape), _dims_of(x, dims) or (0,))


def _product(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.is_square:
        return _square(call, x)
    index = 1 if saved.name == "self" else 0
    if not saved.requires_grad(index):
        return VALUES  # nothing reads it
    other = saved.shape_of(index)
    # If the other factor has a number for each channel, as the weights of norms do, each number has
    # its own gradient, and the scales of channels may differ.
    of_channels = x.dim() >= 2 and other == (x.size(-1),) and x.size(-1) >= NARROW
    return _in_columns(x) if of_channels else VALUES


def _power(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """The gradient ``exponent * x ** (exponent - 1)`` is linear in x if the exponent is 2."""
    if saved.holds("exponent"):
        return EXACT
    return _square(call, x) if saved.setting("exponent") == 2 else RELATIVE


def _square(call: Call, x: Tensor) -> Reads:
    """Squares are mostly summed to the variance of channels, which are then divided by it."""
    reads = _in_columns(x)
    # PyG computes a variance as the mean of squares minus the square of the mean: the two cancel,
    # and their noise does not.
    of_variance = call.caller.startswith(_AGGREGATIONS)
    return dataclasses.replace(reads, least_bits=16) if of_variance else reads


def _quotient(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """Mostly rows over their norms or sums, or channels over their deviations.

    Narrow tensors with a divisor for each element are mostly shares of attention heads.
    """
    if saved.name == "other":
        return RELATIVE
    dims, last = _sharing(x.shape, saved.shape_of(1)), x.dim() - 1
    if last in dims and x.numel() > math.prod(x.size(d) for d in dims):
        return _scaled(x, dims)
    return VALUES if not x.dim() or x.size(-1) < NARROW else _in_columns(x)


def _sharing(dividend: Sequence[int], divisor: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of the dividend whose elements share a divisor."""
    sizes = (*[1] * (len(dividend) - len(divisor)), *divisor)
    pairs = zip(dividend, sizes, strict=False)
    return tuple(d for d, (n, m) in enumerate(pairs) if m == 1 < n)


def _scaled(x: Tensor, dims: tuple[int, ...]) -> Reads:
    """Return values for a gradient that divides each slice by a number of its own.

    Noise relative to the largest slices would become as large as the ratio of two divisors. The
    statistics of few elements take more memory than codes that are precise for each element.
    """
    size = math.prod(x.size(d) for d in dims)
    return _in_slices(x, tuple(x.shape), dims) if size >= FEW else RELATIVE


def reads_of_source(reads: Reads, source: Tensor) -> Reads:
    """Return the part of a tensor that is read if ``reads`` is read of rows gathered from it."""
    if not isinstance(reads, Values) or reads.slices is None:
        return reads
    (shape, dims), slices = reads.slices, None
    size = math.prod(shape[1:])
    if dims == (0,) and source.dim() and source.size(-1) == shape[-1]:
        slices = _in_columns(source).slices
    elif 0 not in dims and size and source.numel() % size == 0:
        # A slice within a row is one of the source.
        slices = _in_slices(source, (source.numel() // size, *shape[1:]), dims).slices
    return dataclasses.replace(reads, slices=slices)


def _in_columns(x: Tensor) -> Values:
    if x.dim() < 2 or not x.numel():
        return VALUES
    return _in_slices(x, (x.numel() // x.size(-1), x.size(-1)), (0,))


def _softmax(call: Call, saved: Attribute, x: Tensor) -> Reads:
    dim = saved.setting("dim")
    return _FEW_SHARES if x.dim() and x.size(_signed(dim)) < NARROW else _SHARES


def _norm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """The gradient of the 2-norm is linear in input / result; the 1-norm reads the sign."""
    power = saved.setting("p" if saved.operation == "norm" else "ord")
    if power is None or power == 2:
        if saved.name != "self":
            return RELATIVE
        dims = getattr(saved.node, "_saved_dim", None)
        return _scaled(x, _dims_of(x, dims)) if dims else VALUES
    return Sign() if power == 1 and saved.name == "self" else EXACT


def _distance(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.setting("p") != 2:
        return EXACT
    return RELATIVE if saved.name == "result" else VALUES


def _elu(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """The derivative jumps at zero, unless the slopes of both parts agree there."""
    return Values(sign=saved.setting("alpha") * saved.setting("input_scale") != 1)


def _threshold(call: Call, saved: Attribute, x: Tensor) -> Reads:
    bound = saved.setting("threshold")
    if _is_rounded(x, bound):
        return EXACT
    return _side("threshold", (bound,), -math.inf, math.inf)


def _hardtanh(call: Call, saved: Attribute, x: Tensor) -> Reads:
    low, high = float(saved.setting("min_val")), float(saved.setting("max_val"))
    if _is_rounded(x, low, high):
        return EXACT
    return _side("hardtanh", (low, high), low, _between(low, high))


def _between(low: float, high: float) -> float:
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    if math.isfinite(low):
        return low + max(1.0, abs(low))
    return high - max(1.0, abs(high)) if math.isfinite(high) else 0.0


def _is_rounded(x: Tensor, *bounds: float) -> bool:
    """Return whether a dtype cannot represent the bounds: kernels then use rounded bounds."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.tensor(bounds, dtype=x.dtype, device="cpu").tolist() != [float(b) for b in bounds]


def _clamp(call: Call, saved: Attribute, x: Tensor) -> Reads:
    if saved.holds("min") or saved.holds("max"):
        return EXACT  # the bounds are saved tensors, too
    bounds = [getattr(saved.node, f"_saved_{name}", None) for name in ("min", "max")]
    low, high = (None if bound is None else float(bound) for bound in bounds)
    ends = -math.inf if low is None else low, math.inf if high is None else high
    if None not in (low, high) and _is_rounded(x, *ends):
        return EXACT  # rounding may move a number between the bounds onto one
    # Elements outside decode to NaN, which is within no bounds.
    return _side(saved.operation, (low, high), math.nan, _between(*ends))


def _reduction(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """``scatter_reduce`` and ``segment_reduce`` save all arguments, for any reduction."""
    if saved.name in ("index", "lengths", "offsets"):
        return VALUES
    return Nothing() if saved.setting("reduce") in ("sum", "mean") else EXACT


def _sparse_mm(call: Call, saved: Attribute, x: Tensor) -> Reads:
    """``torch.sparse.mm`` with a reduction saves the dense operand for the values' gradient."""
    return Nothing() if saved.name == "other" and not saved.requires_grad(0) else VALUES


def _dims_of(x: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions that a call or a node of an operation on ``x`` names, in order.

    Those of a number are none, although PyTorch takes 0 and -1 for it.
    """
    return tuple(sorted(_signed(d) % x.dim() for d in dims)) if x.dim() else ()


def _signed(dim: int) -> int:
    """Return a dimension as an argument: nodes show negative ones as unsigned 64-bit integers."""
    return dim - 2**64 if dim >= 2**63 else dim


# By operation, where the entry depends on its other arguments.
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _batch_norm),
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(("var", "var_mean", "std", "std_mean"), _variance),
    **dict.fromkeys(("softmax", "safe_softmax"), _softmax),
    "div": _quotient,
    "mul": _product,
    "pow": _power,
    "elu": _elu,
    "threshold": _threshold,
    "hardtanh": _hardtanh,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(("scatter_reduce", "segment_reduce"), _reduction),
    "sparse_mm_reduce_impl": _sparse_mm,
    **dict.fromkeys(("norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("dist", "pdist_forward", "pdist"), _distance),
}

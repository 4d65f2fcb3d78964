"""Faults that the fast tests find: what to change where, and which tests see it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One change of one file.

    Args:
        name: What goes wrong.
        file: From the root of the repository.
        old: Text that the file has exactly once.
        new: What stands in its place.
        tests: Files of tests, from ``tests/``, at least one of which fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_CPU = "csrc/cpu"
_CUDA = "csrc/cuda"
_REFERENCE = "gact_graph/ops/reference"

CPU_KERNELS = [
    Fault(
        "codes behind the last element of a tensor are not cleared",
        f"{_CPU}/quantize.cpp",
        "if (const int64_t used = count % kTile) {",
        "if (const int64_t used = count % kTile; used == 1) {",
        ("ops/test_quantize.py",),
    ),
    Fault(
        "the last bit of a mask is not unpacked",
        f"{_CPU}/bitmask.cpp",
        "for (int64_t i = n / kTile * kTile; i < n; ++i) {",
        "for (int64_t i = n / kTile * kTile; i < n - 1; ++i) {",
        ("ops/test_bit_kernels.py",),
    ),
    Fault(
        "a row that spans two parts of the edges loses the second",
        f"{_CPU}/edges.h",
        "for (int64_t part = 1; part < parts; ++part) {",
        "for (int64_t part = 2; part < parts; ++part) {",
        ("ops/test_weighted_sum.py",),
    ),
    Fault(
        "softmax does not subtract the largest score",
        f"{_CPU}/attention.h",
        "*to = std::exp(*to - most[head]);",
        "*to = std::exp(*to);",
        ("ops/test_attention.py",),
    ),
    Fault(
        "the gradient of attention's vector keeps the sums of the row before",
        f"{_CPU}/leaky_attention.cpp",
        "    std::fill(of_row.begin(), of_row.end(), scalar_t(0));\n",
        "",
        ("ops/test_attention.py",),
    ),
    Fault(
        "memory is kept for longer than two steps",
        "csrc/allocator/kept_memory.cpp",
        "    most_ = in_use_;\n",
        "    most_ = std::max(most_, in_use_);\n",
        ("ops/test_kept_memory.py",),
    ),
]

CUDA_KERNELS = [
    Fault(
        "CUDA: codes behind the last element are not cleared",
        f"{_CUDA}/quantize.cu",
        "if (count - t < kChunk) clear_tail(count - t, place, codes);",
        "if (count - t < kChunk - 64) clear_tail(count - t, place, codes);",
        ("ops/test_cuda.py",),
    ),
    Fault(
        "CUDA: the last half word of a mask is not written",
        f"{_CUDA}/bitmask.cu",
        "if (is_first<kEach>() && half < halves) words[half] = bits;",
        "if (is_first<kEach>() && half < halves - 1) words[half] = bits;",
        ("ops/test_cuda.py",),
    ),
    Fault(
        "CUDA: the last edges of a segment are left out",
        f"{_CUDA}/segments.h",
        "for (; edge < last; edge += groups) own.add(state, own.read(row, edge));",
        "for (; edge < last - 1; edge += groups) own.add(state, own.read(row, edge));",
        ("ops/test_cuda_edges.py",),
    ),
    Fault(
        "CUDA: weights are written without dropout",
        f"{_CUDA}/attention.cu",
        "weight[at] = w * dropout.factor<T>(at);",
        "weight[at] = w;",
        ("ops/test_cuda_edges.py",),
    ),
    Fault(
        "CUDA: a wide row begins with the sum of the row before",
        f"{_CUDA}/wide_sum.cu",
        "for (int s = 0; s < kSpan; ++s) sums[s] = {};",
        "for (int s = 1; s < kSpan; ++s) sums[s] = {};",
        ("ops/test_weighted_sum.py",),
    ),
    Fault(
        "CUDA: a wide row that goes on in the next segment loses an edge",
        f"{_CUDA}/wide_sum.cu",
        "if (done < count) span.store(",
        "if (done + 1 < count) span.store(",
        ("ops/test_weighted_sum.py",),
    ),
    Fault(
        "CUDA: exact groups are numbered from the warp's own first",
        f"{_CUDA}/exact_groups.cu",
        "int64_t row = count_exact(stats, first, most);",
        "int64_t row = 0;",
        ("ops/test_exact_groups.py",),
    ),
    Fault(
        "CUDA: the first channel has the statistics of one beyond the last",
        f"{_CUDA}/quantize.cu",
        "if (channel >= count) channel -= count;",
        "if (channel > count) channel -= count;",
        ("ops/test_cuda.py",),
    ),
    Fault(
        "CUDA: the mean of both decodings is added to the wrong one",
        f"{_CUDA}/quantize.cu",
        "(other - value) * *weight + value",
        "(other - value) * *weight + other",
        ("ops/test_cuda.py",),
    ),
]

REFERENCE = [
    Fault(
        "the noise does not depend on the seed",
        f"{_REFERENCE}/quantize.py",
        "noise = noise16(index, seed).view(groups, group_size)",
        "noise = noise16(index, 0).view(groups, group_size)",
        ("ops/test_cpu.py",),
    ),
    Fault(
        "a step is rounded down, so that codes leave the range",
        f"{_REFERENCE}/quantize.py",
        "top.to(torch.float32), up=True)",
        "top.to(torch.float32), up=False)",
        ("ops/test_reference.py",),
    ),
    Fault(
        "the last element of a last, short group is the one before",
        f"{_REFERENCE}/quantize.py",
        "clamp_(max=max(n - 1, 0))",
        "clamp_(max=max(n - 2, 0))",
        ("ops/test_exact_groups.py",),
    ),
    Fault(
        "NaN counts as at most a threshold",
        f"{_REFERENCE}/bitmask.py",
        "_words((x <= threshold).logical_not())",
        "_words(x > threshold)",
        ("ops/test_bit_kernels.py",),
    ),
    Fault(
        "the gradient of softmax misses the mean of its row",
        f"{_REFERENCE}/edges.py",
        "return weight * (gradient - mean[owners])",
        "return weight * (gradient - mean[owners] * 0)",
        ("ops/test_attention.py",),
    ),
    Fault(
        "gradients of weights go to the order of edges",
        f"{_REFERENCE}/weighted_sum.py",
        "of_weight.index_copy_(0, weight_places.long(), product.sum(-1))",
        "of_weight.index_copy_(0, weight_places.long().sort().values, product.sum(-1))",
        ("ops/test_weighted_sum.py",),
    ),
    Fault(
        "the seed of a quantized tensor is dropped",
        "gact_graph/ops/quantize.py",
        "return (seed + (1 << 63)) % (1 << 64) - (1 << 63)",
        "return 0",
        ("ops/test_quantize.py",),
    ),
]

CODECS = [
    Fault(
        "a change in place of a tensor that is kept goes unseen",
        "gact_graph/codecs/keep.py",
        "if now != self.version:",
        "if now is None:",
        ("codecs/test_codecs.py", "capture/test_session.py"),
    ),
    Fault(
        "the widest index does not fit its type",
        "gact_graph/codecs/index.py",
        "most <= info.max:",
        "most <= info.max + 1:",
        ("codecs/test_codecs.py",),
    ),
    Fault(
        "a tensor of more than two values becomes a mask",
        "gact_graph/codecs/mask.py",
        "exact=True) if matched else None",
        "exact=True)",
        ("codecs/test_codecs.py",),
    ),
    Fault(
        "a rebuilt tensor reads the first noise of its source",
        "gact_graph/codecs/base.py",
        "encoded.decorrelated() if gathered else encoded.min_variance()",
        "encoded.min_variance()",
        ("test_bias.py",),
    ),
    Fault(
        "the generator of dropout does not temper its second state",
        f"{_CPU}/bernoulli.cpp",
        "    temper_all();\n    used_ = 0;",
        "    used_ = 0;",
        ("ops/test_bernoulli.py",),
    ),
    Fault(
        "the noise of a normalized context does not sum to zero",
        "gact_graph/codecs/slices.py",
        "value=-1 / count",
        "value=1 / count",
        ("codecs/test_slices.py",),
    ),
    Fault(
        "the noise of rows over their norms is relative to the channels",
        "gact_graph/capture/operations.py",
        "if last in dims and",
        "if last not in dims and",
        ("codecs/test_slices.py",),
    ),
    Fault(
        "the least number of a dtype is rounded to the greatest",
        "gact_graph/codecs/round.py",
        "short.sign() * most",
        "short.abs().sign() * most",
        ("codecs/test_round.py",),
    ),
    Fault(
        "a context comes back before it has left the device",
        "gact_graph/codecs/offload/swap.py",
        "        streams.wait(prefetch, buffer.last)\n",
        "",
        ("codecs/test_swap.py",),
    ),
]

CAPTURE = [
    Fault(
        "a mode that a signal left behind changes later operations",
        "gact_graph/capture/replaced.py",
        "if self.is_active and func is self._operator",
        "if func is self._operator",
        ("capture/test_replaced.py",),
    ),
    Fault(
        "a product that the next operation reads has no values yet",
        "gact_graph/capture/postponed.py",
        "if not may_wait or call is None or postponed.is_read(call):",
        "if not may_wait or call is None:",
        ("capture/test_postponed.py",),
    ),
    Fault(
        "a sum that is read after its bias was added contains the bias",
        "gact_graph/capture/shared_sums.py",
        "            alive[0].data.copy_(last.again().view(alive[0].shape))\n",
        "",
        ("capture/test_postponed.py",),
    ),
    Fault(
        "batch norm's gradient keeps its mean",
        "csrc/cpu/batch_norm.cpp",
        "shift[c] = share * totals[c];",
        "shift[c] = 0;",
        ("ops/test_batch_norm.py", "capture/test_batch_norm.py"),
    ),
    Fault(
        "a gradient is written over a tensor that something else holds",
        "gact_graph/capture/in_place.py",
        "return packed is not None and packed[0].context.sample.makes_memory",
        "return True",
        ("capture/test_in_place.py",),
    ),
    Fault(
        "float64 elements far from zero get codes of float32",
        "gact_graph/codecs/quantize.py",
        "if x.dtype != torch.float64 or not x.numel():",
        "if True:",
        ("capture/test_counterexamples.py",),
    ),
    Fault(
        "a decoded tensor that other operations will read counts as nobody's",
        "gact_graph/codecs/rebuild.py",
        "return self.readers == 1",
        "return True",
        ("capture/test_in_place.py", "capture/test_gather.py"),
    ),
    Fault(
        "a channel begins one run late",
        "csrc/cpu/quantize.cpp",
        "const int64_t channel = index / inner_ % count_;",
        "const int64_t channel = (index + 1) / inner_ % count_;",
        ("codecs/test_slices.py", "ops/test_quantize.py"),
    ),
    Fault(
        "a tensor that changed after its mask is stored by the mask",
        "gact_graph/codecs/nonzero.py",
        "if not others_are_zero:",
        "if False:",
        ("capture/test_nonzero.py",),
    ),
    Fault(
        "weights of rows belong to rows of equal length",
        "gact_graph/codecs/group_widths.py",
        "row = torch.searchsorted(starts, ends, right=True).sub_(1)",
        "row = (ends * len(weights) // starts[-1])",
        ("capture/test_nonzero.py",),
    ),
    Fault(
        "codes of groups on a GPU get the words of whole bits",
        "gact_graph/codecs/group_widths.py",
        "int(bits * whole) * (group_size // TILE)",
        "int(bits) * whole * (group_size // TILE)",
        ("codecs/test_group_widths.py",),
    ),
    Fault(
        "each forward draws the same noise",
        "gact_graph/capture/noise.py",
        "number = 0 if self.repeated else self.forward",
        "number = 0",
        ("capture/test_noise.py",),
    ),
    Fault(
        "elements that were changed in place are taken for those before",
        "gact_graph/support/storage.py",
        "(where, version_of(tensor), tensor.dtype)",
        "(where, tensor.dtype)",
        ("capture/test_session.py",),
    ),
    Fault(
        "a mask serves a backward that reads values",
        "gact_graph/capture/cache.py",
        "exact = context.sample.exact",
        "exact = True",
        ("capture/test_session.py", "codecs/test_reads_gradients.py"),
    ),
    Fault(
        "a storage that two operations save is counted twice",
        "gact_graph/capture/ledger.py",
        "row.raw_bytes *= place not in raw and place not in owned",
        "row.raw_bytes *= place not in owned",
        ("capture/test_session.py",),
    ),
    Fault(
        "a tensor is computed again from an operand that has changed",
        "gact_graph/capture/recipes.py",
        "return record.recipe if record.recipe.is_current() else None",
        "return record.recipe",
        ("capture/test_gather.py",),
    ),
]

ADAPTIVE = [
    Fault(
        "variance falls with the width, not with its square",
        "gact_graph/adaptive/allocator.py",
        "(2.0**bits - 1) ** -2",
        "(2.0**bits - 1) ** -1",
        ("adaptive/test_allocator.py",),
    ),
    Fault(
        "a sensitivity that has grown is smoothed away",
        "gact_graph/adaptive/scheme.py",
        "max(value, (1 - _NEW) * old + _NEW * value)",
        "(1 - _NEW) * old + _NEW * value",
        ("adaptive/test_scheme.py",),
    ),
    Fault(
        "errors of narrow contexts are added to gradients, not taken beside them",
        "gact_graph/adaptive/sensitivity.py",
        "own = own.sub_(fine) if _is_alone(own, gradients) else own - fine",
        "own = own + fine",
        ("adaptive/test_sensitivity.py",),
    ),
    Fault(
        "a measurement writes over a gradient that a node has passed on",
        "gact_graph/adaptive/sensitivity.py",
        "if tensor.layout != torch.strided or any(tensor is other for other in others):",
        "if tensor.layout != torch.strided:",
        ("adaptive/test_sensitivity.py",),
    ),
]

API = [
    Fault(
        "random states do not return after a second run",
        "gact_graph/support/run_state.py",
        "            stack.callback(set_random_states, before)\n",
        "",
        ("support/test_run_state.py",),
    ),
    Fault(
        "a view loses its offset",
        "gact_graph/support/storage.py",
        "offset = self.offset + flat.storage_offset()",
        "offset = flat.storage_offset()",
        ("support/test_storage.py",),
    ),
    Fault(
        "buffers are not restored before forward runs once more",
        "gact_graph/support/exact.py",
        "if not torch.equal(buffer, values):",
        "if torch.equal(buffer, values):",
        ("api/test_forces.py",),
    ),
    Fault(
        "the seed of a resumed run starts anew",
        "gact_graph/api/controller.py",
        "        self.forwards += 1\n",
        "",
        ("api/test_wrap.py",),
    ),
]

LAYERS = [
    Fault(
        "edges by source have their positions in the order by destination",
        "gact_graph/layers/blocks/order.py",
        "permutation = self.permutation.index_select(0, permutation)",
        "permutation = permutation.index_select(0, permutation)",
        ("layers/blocks/test_order.py",),
    ),
    Fault(
        "tensors that hooks inside of messages hold count as never read",
        "gact_graph/layers/blocks/trace.py",
        "self.hooked = self.hooked or not packs_with(self._pack)",
        "self.hooked = False",
        ("layers/blocks/test_counterexamples.py",),
    ),
    Fault(
        "a parameter that is not passed gets another value than its default",
        "gact_graph/layers/blocks/sort_arguments.py",
        "continue  # PyG takes the default",
        "values = {**values, name: type}",
        ("layers/blocks/test_counterexamples.py",),
    ),
    Fault(
        "a buffer that a layer updates is read again after the next update",
        "gact_graph/layers/recompute/runs.py",
        "if key in self._owned and self._owned[key] == version_of(tensor):",
        "if key in self._owned:",
        ("layers/recompute/test_layers.py",),
    ),
    Fault(
        "an order is found again though its edges have changed",
        "gact_graph/layers/blocks/order.py",
        "if entry is None or entry.content != content:",
        "if entry is None:",
        ("layers/blocks/test_order_cache.py",),
    ),
    Fault(
        "the gradient of a product with a sparse matrix is not that of the transposed matrix",
        "gact_graph/layers/blocks/sparse_product.py",
        "arguments = matrix, ctx.values, ctx.order, not ctx.transposed, None",
        "arguments = matrix, ctx.values, ctx.order, ctx.transposed, None",
        ("layers/blocks/test_sparse_product.py",),
    ),
    Fault(
        "a sparse matrix that needs a gradient gets none",
        "gact_graph/layers/blocks/sparse_product.py",
        "if matrix.requires_grad or matrix.dim() != 2",
        "if matrix.dim() != 2",
        ("layers/blocks/test_sparse_product.py",),
    ),
    Fault(
        "the gradient at the bounds of a clamp is assumed",
        "gact_graph/capture/sides.py",
        "_AROUND = (-1.0, _LOW, -0.0, 0.0, 1.0, _HIGH, 3.0",
        "_AROUND = (-1.0, 1.0, 3.0",
        ("capture/test_sides.py",),
    ),
    Fault(
        "the gradient at bounds is looked at while forward runs",
        "gact_graph/capture/session.py",
        "        find_tests()\n",
        "",
        ("capture/test_sides.py",),
    ),
    Fault(
        "the columns of a norm share the noise of the largest in a compiled graph",
        "gact_graph/capture/compiled.py",
        "by_column = form == _CODES and saved.dim() == 2",
        "by_column = False and saved.dim() == 2",
        ("capture/test_compiled.py",),
    ),
    Fault(
        "a transposed matrix is coded by column in a compiled graph",
        "gact_graph/capture/compiled.py",
        "form, saved = _TRANSPOSED, saved.t()",
        "pass",
        ("capture/test_compiled.py",),
    ),
    Fault(
        "a joint mask of a compiled graph has the elements of the dropout alone",
        "gact_graph/capture/partition.py",
        "_aten.logical_and.default, (kept, positive)",
        "_aten.logical_and.default, (kept, kept)",
        ("capture/test_compiled.py",),
    ),
    Fault(
        "backward in a compiled graph draws noise of its own",
        "gact_graph/layers/blocks/graph_work.py",
        "with _seeded(seed), capture_disabled_in_backward():",
        "with capture_disabled_in_backward():",
        ("layers/blocks/test_compiled.py",),
    ),
    Fault(
        "a compiled graph does not see that a setting of a layer has changed",
        "gact_graph/layers/blocks/compiled.py",
        "len(args), constants, settings)",
        "len(args), constants, [])",
        ("layers/blocks/test_compiled.py",),
    ),
    Fault(
        "sorted edges are dropped before the backward of a compiled graph",
        "gact_graph/layers/blocks/graph_work.py",
        "_held[state] = order",
        "_held[state] = state",
        ("layers/blocks/test_compiled.py",),
    ),
    Fault(
        "a part's halo lacks the sources of its own number",
        "gact_graph/layers/halo/parts.py",
        "halo = halo[owner[halo].argsort(stable=True)]",
        "halo = halo.flip(0)",
        ("layers/halo/test_halo.py",),
    ),
    Fault(
        "the running variance over all parts is the biased one",
        "gact_graph/layers/halo/norm.py",
        "(var * (count / (count - 1)))",
        "(var * (count / count))",
        ("layers/halo/test_norm.py",),
    ),
]

_BUDGET = "gact_graph/api/budget"

PLANNING = [
    Fault(
        "a part of a step does not take its exact tensors",
        f"{_BUDGET}/memory_model.py",
        "exactly = without.stored.get(other, stored)",
        "exactly = stored",
        ("api/budget/test_memory_model.py",),
    ),
    Fault(
        "exact tensors are planned to follow from codes",
        f"{_BUDGET}/ladder.py",
        "if model.needs:",
        "if False:",
        ("api/budget/test_ladder.py",),
    ),
    Fault(
        "an offloaded tensor is planned to stay on the device",
        f"{_BUDGET}/memory_model.py",
        "(held >= least), 0.0, held)",
        "(held >= least), held, held)",
        ("api/budget/test_memory_model.py",),
    ),
    Fault(
        "sums of features are kept although the features changed",
        "gact_graph/layers/blocks/constant_sums.py",
        "and self.content == content",
        "and self.content is not None",
        ("layers/blocks/test_constant_sums.py",),
    ),
    Fault(
        "kept sums are returned although an earlier result still shares their memory",
        "gact_graph/layers/blocks/constant_sums.py",
        "return self.sums is None or holders_of(self.sums) == self.holders",
        "return True",
        ("layers/blocks/test_constant_sums.py",),
    ),
    Fault(
        "kept sums that the caller has changed in place are returned again",
        "gact_graph/layers/blocks/constant_sums.py",
        "and (self.checksum is None or self.checksum == _content(self.sums))",
        "and self.checksum != 0",
        ("layers/blocks/test_constant_sums.py",),
    ),
    Fault(
        "the widest choices of an integer program are not bounded by memory",
        f"{_BUDGET}/ladder.py",
        "return np.asarray(most > budget)",
        "return np.asarray(most > 2 * budget)",
        ("api/budget/test_ladder.py",),
    ),
    Fault(
        "a mixed plan is not corrected by its trial",
        f"{_BUDGET}/mixed.py",
        "factor = trial.peak / part.peak(rung.choices)",
        "factor = 0.8",
        ("api/budget/test_plan.py",),
    ),
    Fault(
        "pieces of work do not shrink with a part of a graph",
        "gact_graph/support/part.py",
        "return max(1, round(count * _share))",
        "return count",
        ("support/test_part.py", "api/budget/test_trials.py"),
    ),
    Fault(
        "a larger graph is planned as if the last step had kept to its plan",
        f"{_BUDGET}/budget.py",
        "return max(self._excess, self._peak.nbytes / max(planned, default=math.inf))",
        "return max(self._excess, 1.0)",
        ("api/budget/test_budget.py",),
    ),
    Fault(
        "times of real steps do not correct those of trials",
        f"{_BUDGET}/budget.py",
        "pace *= self.measured_seconds / self.planned_seconds",
        "pace = 1.0",
        ("api/budget/test_budget.py",),
    ),
    Fault(
        "offloading takes no time",
        f"{_BUDGET}/planned_tensor.py",
        "seconds + stored * of_byte, 0.0",
        "seconds, 0.0",
        ("api/budget/test_delays.py",),
    ),
    Fault(
        "a progress line starts a thread under a limit of memory",
        "gact_graph/support/progress.py",
        "if has_limit() or not _is_first_rank():",
        "if not _is_first_rank():",
        ("support/test_progress.py",),
    ),
    Fault(
        "the second tensor of a file overwrites the first",
        "gact_graph/codecs/offload/files.py",
        "start = int(buffer.storage_offset()) * buffer.element_size()",
        "start = 0",
        ("codecs/test_files.py",),
    ),
]

FAULTS = [
    *(*CPU_KERNELS, *CUDA_KERNELS, *REFERENCE, *CODECS, *CAPTURE, *ADAPTIVE, *API, *LAYERS),
    *PLANNING,
]

"""Random programs of tensor operations.

A variable's kind is the first letter of its name: ``n`` is float [N, C], ``z`` complex [N, C],
``h`` float16 and ``b`` bfloat16 [N, C], ``v`` float [N], ``e`` float [E, C], ``q`` float [2, N, C]
and ``m`` bool [N, C]. ``i`` [E] and ``p`` [N] are places among the N rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Draw = Any

EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "n": (
        # arithmetic
        "{n} * {n2}",
        "{n} + {n2}",
        "{n} - {n2} * 0.5",
        "{n} / (1.5 + {n2}.abs())",
        "{n} @ self.w",
        "{n} @ self.w.t()",
        "torch.addmm(self.bias, {n}, self.w)",
        "torch.addcmul({n}, {n2}, {n3}, value=0.5)",
        "torch.addcdiv({n}, {n2}, {n3}.abs() + 1.0)",
        "torch.lerp({n}, {n2}, 0.3)",
        "torch.einsum('nc,dc->nd', {n}, self.w)",
        "{n} * {v}[:, None]",
        "{n} * self.bias",
        "-{n}",
        "{n} ** 2",
        "{n} ** 3",
        "{n}.abs() ** 1.5",
        "torch.pow({n}.abs() + 0.5, {n2}.tanh())",
        "2.0 ** {n}.tanh()",
        "{n}.square()",
        "torch.atan2({n}, {n2}.abs() + 1.0)",
        "torch.hypot({n}, {n2}.abs() + 1.0)",
        "{n}.fmod(1.5)",
        "torch.remainder({n}, 1.5)",
        # pointwise functions
        "{n}.exp().clamp(max=20.0)",
        "{n}.abs().add(0.5).log()",
        "{n}.abs().log1p()",
        "{n}.abs().add(0.3).sqrt()",
        "{n}.abs().add(0.3).rsqrt()",
        "{n}.abs().add(0.3).reciprocal()",
        "{n}.sin()",
        "{n}.cos()",
        "{n}.tanh()",
        "{n}.sigmoid()",
        "{n}.erf()",
        "{n}.expm1().clamp(max=9.0)",
        "{n}.atan()",
        "{n}.asinh()",
        "{n}.sinc()",
        "{n}.relu()",
        "{n}.abs()",
        "{n}.sign() * {n2}",
        "{n}.clamp(-0.5, 0.7)",
        "{n}.clamp(min={n2})",
        "F.relu6({n})",
        "F.leaky_relu({n}, 0.2)",
        "F.elu({n})",
        "F.celu({n}, 1.3)",
        "F.selu({n})",
        "F.gelu({n})",
        "F.gelu({n}, approximate='tanh')",
        "F.silu({n})",
        "F.mish({n})",
        "F.softplus({n})",
        "F.softsign({n})",
        "F.logsigmoid({n})",
        "F.hardtanh({n})",
        "F.hardswish({n})",
        "F.hardsigmoid({n})",
        "F.hardshrink({n})",
        "F.softshrink({n})",
        "F.tanhshrink({n})",
        "F.threshold({n}, 0.1, -1.0)",
        "F.prelu({n}, self.slope)",
        "F.rrelu({n}, training=self.training)",
        "F.glu(torch.cat([{n}, {n2}], 1))",
        "F.dropout({n}, 0.4, self.training)",
        "F.alpha_dropout({n}, 0.3, self.training)",
        "F.feature_alpha_dropout({n}, 0.3, self.training)",
        "F.dropout1d({n}, 0.4, self.training)",
        # what normalizes
        "{n}.softmax(1)",
        "{n}.softmax(0)",
        "{n}.log_softmax(1)",
        "{n}.masked_fill({m}, -torch.inf).softmax(1).nan_to_num()",
        "{n}.masked_fill({m}, -torch.inf).log_softmax(1).nan_to_num(neginf=-3.0)",
        "{n} - {n2}.logsumexp(1, keepdim=True)",
        "F.normalize({n}, dim=1)",
        "F.layer_norm({n}, (C,), self.slope, self.bias)",
        "F.group_norm({n}, 2, self.slope, self.bias)",
        "F.batch_norm({n}, None, None, self.slope, self.bias, training=True)",
        "self.norm({n})",
        "F.instance_norm({n}[None])[0]",
        "F.rms_norm({n}, (C,))",
        "F.local_response_norm({n}[None], 3)[0]",
        "{n} / ({n2}.norm(dim=1, keepdim=True) + 0.1)",
        "{n} / ({n2}.std(0) + 0.1)",
        "{n} * {n2}.var(1, keepdim=True)",
        "{n} - {n2}.mean(0)",
        # views
        "{n}.view(N // 2, 2, C).transpose(0, 1).reshape(N, C)",
        "{n}.t().contiguous().t()",
        "{n}.flip(0)",
        "{n}.roll(1, 0)",
        "{n}.chunk(2, 1)[1].repeat(1, 2)",
        "torch.cat({n}.split(3, 0)[::-1])",
        "torch.stack({n}.unbind(1)[::-1], 1)",
        "torch.stack([{n}, {n2}])[1]",
        "{n}[:, 1:2].expand(N, C)",
        "{n}[:1].expand(N, C) * {n2}",
        "{n}.as_strided((N, C), (C, 1))",
        "{n}.as_strided((N, C // 2), (C, 2)).repeat(1, 2)",
        "{n}.narrow(1, 2, 4).repeat(1, 2)",
        "{n}[::2].repeat_interleave(2, 0)",
        "{n}.unfold(1, 3, 1).sum(-1) @ self.w[:6]",
        "{n}.diagonal().expand(N, C) * {n2}",
        "{n}.movedim(0, 1).permute(1, 0)",
        "{n}.unsqueeze(0).squeeze(0)",
        "{n}.tril() + {n2}.triu()",
        "{n}.detach() * {n2}",
        "{n}.clone()",
        "{n}.contiguous()",
        "{n}.view(-1).view(N, C)",
        "{n}.swapaxes(0, 1).reshape(N, C)",
        # gathers and scatters
        "{n}.index_select(0, p)",
        "{n}[p]",
        "{n}[p.tolist()]",
        "{n}.gather(0, p[:, None].expand(N, C))",
        "{n}.take_along_dim(p[:, None], 0)",
        "{n}[m0[:, 0].nonzero()[:, 0].repeat(N)[:N]]",
        "torch.zeros(N, C).index_add(0, i, {e})",
        "torch.zeros(N, C).scatter_add(0, i[:, None].expand(E, C), {e})",
        "torch.zeros(N, C).index_put((i,), {e}, accumulate=True)",
        "torch.zeros(N, C).scatter_reduce(0, i[:, None].expand(E, C), {e}, 'amax')",
        "torch.zeros(N, C).scatter_reduce(0, i[:, None].expand(E, C), {e}, 'mean')",
        "torch.ones(N, C).scatter_reduce(0, i[:, None].expand(E, C), {e}.tanh() + 2.0, 'prod')",
        "{n}.index_copy(0, p, {n2})",
        "{n}.index_fill(0, p[:3], 0.5)",
        "{n}.scatter(1, p[:, None] % C, {n2}[:, :1])",
        "{e}.view(E // 2, 2, C).sum(1).index_select(0, p % (E // 2))",
        "F.embedding(p, {n})",
        "F.embedding_bag(i.view(-1, 2), {n})[p % (E // 2)]",
        # choices
        "torch.where({m}, {n}, {n2})",
        "torch.where({n} > 0.3, {n}, {n2} * 2.0)",
        "{n}.masked_fill({m}, 0.7)",
        "{n}.masked_scatter({m}, {n2})",
        "torch.maximum({n}, {n2})",
        "torch.fmin({n}, {n2})",
        "{n}.sort(1).values",
        "{n}.topk(4, 1).values.repeat(1, 2)",
        "{n}.amax(1, keepdim=True) * {n2}",
        "{n}.max(0).values * {n2}",
        "{n}.median(1, keepdim=True).values + {n2}",
        "{n}.cummax(0).values",
        "{n}.cumsum(1)",
        "{n}.tanh().cumprod(1)",
        "{n}.logcumsumexp(1)",
        "{n} * {n2}.tanh().prod(1, keepdim=True)",
        "{n}.nan_to_num()",
        # other kinds
        "{z}.real",
        "{z}.imag",
        "{z}.conj().imag",
        "{z}.abs()",
        "{z}.angle()",
        "({z} * {z2}.conj()).real",
        "torch.view_as_real({z}.resolve_conj())[..., 1]",
        "{h}.to(x.dtype)",
        "{b}.to(x.dtype)",
        "{h} * {n}",
        "{v}.repeat(C).view(C, N).t()",
        "torch.outer({v}, {v2})[:, :C]",
        "{q}[0]",
        "{q}.sum(0)",
        "{q}.unbind(0)[1]",
        "{m}.to(x.dtype) * {n}",
        # modules and heavy functions
        "self.linear({n})",
        "self.bilinear({n}, {n2})",
        "self.attention({n}[None], {n2}[None], {n3}[None])[0][0]",
        "self.attention({n}, {n}, {n})[1] @ {n2}",
        "self.encoder({n}[None])[0]",
        "self.lstm({n}[None])[0][0]",
        "self.gru({n}[None])[0][0]",
        "self.cell({n}, {n2})",
        "self.conv({n}.t()[None])[0].t()",
        "F.avg_pool1d({n}[None], 3, 1, 1)[0]",
        "F.max_pool1d({n}[None], 3, 1, 1)[0]",
        "F.interpolate({n}[None, :, ::2], C, mode='linear')[0]",
        "torch.cdist({n}, {n2}) @ {n3}",
        "torch.linalg.solve(torch.eye(C) * 3.0 + (self.w @ self.w.t()), {n}.t()).t()",
        "torch.matrix_exp({n}.t() @ {n2} * 0.01) @ self.w + {n3}[:C].mean()",
        "torch.linalg.vector_norm({n}, dim=1, keepdim=True) * {n2}",
        "torch.cosine_similarity({n}, {n2})[:, None] * {n3}",
        "F.kl_div({n}.log_softmax(1), {n2}.softmax(1)) * {n3}",
        "F.cross_entropy({n}, p % C) * {n2}",
        "F.mse_loss({n}, {n2}) + {n3}",
        "F.smooth_l1_loss({n}, {n2}, reduction='none')",
        "F.binary_cross_entropy_with_logits({n}, {n2}.sigmoid(), reduction='none')",
        "checkpoint(lambda t: (t @ self.w).tanh() * t, {n}, use_reentrant=False)",
        "Cube.apply({n})",
        "Sum.apply({n}, {n2})[0]",
        "Sum.apply({n}, {n2})[1]",
        "Kept.apply({n})",
        "torch.autograd.grad(({n}.tanh() * {n}).sum(), {n}, create_graph=True)[0]",
        "torch.fft.irfft(torch.fft.rfft({n}, dim=1) * self.phase[: C // 2 + 1], C, dim=1)",
        "torch.sparse.mm(sparse, {n})",
    ),
    "z": (
        "torch.complex({n}, {n2})",
        "{z} * {z2}",
        "{z} + {z2}",
        "{z}.conj()",
        "{z}.conj().conj()",
        "{z}.mH.mT",
        "-{z}",
        "{z} * self.phase",
        "{z} / (2.0 + {z2}.abs())",
        "{z}.conj() * {n}",
        "{z}.tanh() * 0.5",
        "({z} * 0.2).exp()",
        "torch.fft.fft({z}, dim=1, norm='ortho')",
        "torch.fft.ifft({n}, dim=1)",
        "torch.polar({n}.abs(), {n2})",
        "{z}.index_select(0, p)",
        "{z}.resolve_conj()",
        "{z}[:, ::2].repeat(1, 2)",
        "{z}.conj().t().contiguous().t()",
        "torch.view_as_complex(torch.stack([{n}, {n2}], -1))",
        "{z} @ (self.w * self.phase)",
        "torch.where({m}, {z}, {z2}.conj())",
        "{z}.sgn() * {z2}",
        "{z}.conj().imag * {z2}",
        "{z} ** 2",
    ),
    "h": (
        "{n}.half()",
        "{h} * {h2}",
        "{h}.float().tanh().half()",
        "{h} @ self.w.half()",
        "{h}.softmax(1)",
        "F.gelu({h})",
        "{h}.index_select(0, p)",
        "F.layer_norm({h}, (C,))",
    ),
    "b": (
        "{n}.bfloat16()",
        "{b} + {b2}.tanh()",
        "{b} * {b2}",
        "{b} @ self.w.bfloat16()",
        "{b}.sigmoid()",
        "F.dropout({b}, 0.3, self.training)",
        "{b}[p]",
    ),
    "v": (
        "{n}.sum(1)",
        "{n}.mean(1)",
        "{n}.norm(dim=1)",
        "{n}.norm(p=1, dim=1)",
        "{n}.norm(p=3, dim=1)",
        "{n}.norm(p=torch.inf, dim=1)",
        "{n}.std(1)",
        "{n}[:, 3]",
        "({n} * {n2}).sum(1)",
        "{n}.logsumexp(1)",
        "{n}.amin(1)",
        "{n} @ self.bias",
        "{v} * {v2}",
        "{v}.cumsum(0)",
        "{v}.tanh()",
        "torch.einsum('nc,nc->n', {n}, {n2})",
        "torch.bincount(i, weights={v}.detach()[i], minlength=N) * {v}",
        "torch.special.i0e({v})",
        "{v}.softmax(0)",
    ),
    "e": (
        "{n}.index_select(0, i)",
        "{n}[i]",
        "{n}[i] * {n2}[i.flip(0)]",
        "{n}.index_select(0, i) * {e}",
        "{n}[p].repeat_interleave(2, 0)[:E]",
        "{e} * {e2}",
        "{e}.relu()",
        "{e} * self.bias",
        "{e} @ self.w",
        "{e} * {v}[i][:, None]",
        "{e}.sigmoid() * {e2}",
        "{e}.exp().clamp(max=5.0)",
        "-{e}",
        "torch.cat([{n}, {n2}])[:E]",
        "F.embedding(i, {n}) * {e}",
        "{e} / ({e2}.abs() + 1.0)",
        "softmax({e}, i, num_nodes=N)",
        "{z}[i].imag",
        "{z}.conj().index_select(0, i).imag",
        "F.dropout({e}, 0.3, self.training)",
        "{n}.gather(0, i[:, None].expand(E, C)).pow(2)",
        "{e}[:, :4].repeat(1, 2)",
        "{n}.index_select(0, i).neg()",
    ),
    "q": (
        "torch.stack([{n}, {n2}])",
        "{n}.expand(2, N, C)",
        "{q} * {n}",
        "{q}.softmax(-1)",
        "torch.bmm({q}, {q2}.transpose(1, 2)) @ {q}",
        # Bounded, because backward computes exp(q k) again: noise on large scores has no bound.
        "F.scaled_dot_product_attention({q}.tanh(), {q2}.tanh(), {q3})",
        "F.scaled_dot_product_attention({q}.tanh(), {q2}.tanh(), {q3}, is_causal=True)",
        "F.scaled_dot_product_attention(*[{q}[None].tanh()] * 2, {q2}[None], dropout_p=0.2)[0]",
        "F.scaled_dot_product_attention({q}[None].tanh(), *[{q2}[None].tanh()] * 2)[0]",
        "F.multi_head_attention_forward({q}, {q2}, {q2}, C, 2, None, None, None, None, False,"
        " 0.0, self.w, None, use_separate_proj_weight=True, q_proj_weight=self.w,"
        " k_proj_weight=self.w, v_proj_weight=self.w)[0]",
        "{q}.transpose(1, 2).reshape(2, N, C)",
        "torch.baddbmm({q}, {q2} @ self.w, self.w.expand(2, C, C))",
        "{q}.flip(0)",
        "{q}.cumsum(0)",
    ),
    "m": ("{n} > 0.1", "{n} < {n2}", "({n} > 0) & {m}", "~{m}"),
}

# Statements that change or free something.
CHANGES: tuple[str, ...] = (
    "{n}.mul_(2.0)",
    "{n}.add_({n2})",
    "{n}.relu_()",
    "{n}.clamp_(-1.0, 1.0)",
    "{n}.neg_()",
    "{n}.tanh_()",
    "{n}.exp_().clamp_(max=9.0)",
    "{n}.t_().t_()",
    "{n}[1:4] = {n2}[:3]",
    "{n}[:, ::2] *= 0.5",
    "{n}[p[:4]] = {n2}[:4]",
    "{n}.index_add_(0, i, {e})",
    "{n}.masked_fill_({m}, 0.2)",
    "{n}.view(-1)[::3].zero_()",
    "{n}.chunk(2, 1)[0].mul_(1.5)",
    "{n}.copy_({n2})",
    "{n}.scatter_add_(0, i[:, None].expand(E, C), {e})",
    "{n}.fill_diagonal_(0.5)",
    "F.leaky_relu_({n}, 0.1)",
    "F.dropout({n}, 0.5, self.training, inplace=True)",
    "F.rrelu_({n}, training=self.training)",
    "F.elu_({n})",
    "F.hardtanh_({n})",
    "{n}.addcmul_({n2}, {n3})",
    "{n}.detach().add_(0.1)",
    "{e}.mul_({e2})",
    "{e}.relu_()",
    "{z}.mul_({z2})",
    "{z}.conj_physical_()",
    "{q}[0].mul_(2.0)",
    "{h}.mul_(0.5)",
    "m0.logical_not_()",
    "{n}.register_hook(lambda g: g * 2.0)",
    "{n}.retain_grad()",
    "{n} = {n2}",
    "del {n}",
    "del {e}",
    "del {z}",
    "del {q}",
    "with torch.no_grad():\n    {n} = {n} * 0.5",
    "{n}, {n2} = {n2}, {n}",
)

BASE = {
    "n0": "x @ self.w",
    "n1": "y @ self.w.t()",
    "n2": "x",
    "z0": "torch.complex(x @ self.w, y @ self.w.t())",
    "z1": "c * self.bias",
    "h0": "(x @ self.w).half()",
    "b0": "(x @ self.w).bfloat16()",
    "v0": "y @ self.bias",
    "e0": "(y @ self.w).index_select(0, i)",
    "q0": "torch.stack([x @ self.w, y @ self.w.t()])",
    "m0": "x > 0",
}

PREAMBLE = '''\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import softmax

torch.set_default_dtype(torch.{dtype})
N, C, E = 12, 8, 20


def normal(seed, *shape, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, g):
        x, square = ctx.saved_tensors
        return g * (2 * square + x * x)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        total = a.sigmoid() + b
        ctx.save_for_backward(a, total)
        ctx.set_materialize_grads(False)
        return total, a.sum(1, keepdim=True) * b

    @staticmethod
    def backward(ctx, g, h):
        a, total = ctx.saved_tensors
        s = a.sigmoid()
        b = total - s
        ga = gb = 0.0
        if g is not None:
            ga, gb = ga + g * s * (1 - s), gb + g
        if h is not None:
            ga, gb = ga + (h * b).sum(1, keepdim=True), gb + h * a.sum(1, keepdim=True)
        return ga + torch.zeros_like(a), gb + torch.zeros_like(b)


class Kept(torch.autograd.Function):
    """Saves its output, and an index."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        order = x.argsort(1)
        ctx.save_for_backward(y, order)
        return y.gather(1, order)

    @staticmethod
    def backward(ctx, g):
        y, order = ctx.saved_tensors
        return torch.zeros_like(g).scatter(1, order, g) * (1 - y * y)


def finish(model, record, backward, outputs, **inputs):
    """Ends a step, with a kind of ``backward``."""
    record += [(f"output {i}", out.detach().clone()) for i, out in enumerate(outputs)]
    losses = [(out.to(torch.float64) * normal(90 + i, *out.shape)).sum()
              for i, out in enumerate(outputs)]
    total = sum(losses) + 0.0 * sum(p.sum() for p in (model.w, model.bias))
    if backward == "twice":
        total.backward(retain_graph=True)
        total.backward()
    elif backward == "one by one":
        for loss in losses:
            if loss.requires_grad:
                loss.backward(retain_graph=True)
    elif backward == "grad":
        given = list(model.parameters())
        for p, g in zip(given, torch.autograd.grad(total, given, allow_unused=True)):
            p.grad = g
    else:
        total.backward()
    for name, p in [*model.named_parameters(), *inputs.items()]:
        if p.grad is not None:
            record.append((f"gradient of {name}", p.grad.clone()))
    record += [(f"buffer {name}", b.clone()) for name, b in model.named_buffers()]
    with torch.no_grad():
        for p in model.parameters():  # not by the gradient, of which noise would grow
            p.mul_(0.95)
    model.zero_grad()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(normal(1, C, C) / 2)
        self.bias = nn.Parameter(normal(2, C))
        self.slope = nn.Parameter(normal(3, C).abs())
'''

# Made where the program names them.
PARTS = {
    "phase": "self.register_buffer('phase', torch.polar(torch.ones(C), normal(4, C)))",
    "norm": "self.norm = nn.BatchNorm1d(C)",
    "linear": "self.linear = nn.Linear(C, C)",
    "bilinear": "self.bilinear = nn.Bilinear(C, C, C)",
    "attention": "self.attention = nn.MultiheadAttention(C, 2, batch_first=True)",
    "encoder": "self.encoder = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.2, batch_first=True)",
    "lstm": "self.lstm = nn.LSTM(C, C, batch_first=True)",
    "gru": "self.gru = nn.GRU(C, C, batch_first=True)",
    "cell": "self.cell = nn.GRUCell(C, C)",
    "conv": "self.conv = nn.Conv1d(C, C, 3, padding=1)",
}


@dataclass
class Program:
    """A drawn program."""

    source: str
    blocks: None = None


_HOLE = re.compile(r"\{([a-z])(\d?)\}")


def _fill(draw: Draw, template: str, live: list[str]) -> str:
    """The template with a live variable of its kind in each hole, and the same in equal holes."""
    chosen: dict[str, str] = {}

    def variable(match: re.Match[str]) -> str:
        hole = match[0]
        if hole not in chosen:
            kind = [v for v in live if v[0] == match[1]]
            # What was made by the program rather than what it began with.
            made = [v for v in kind if v not in BASE]
            chosen[hole] = draw(st.sampled_from(kind + 4 * made))
        return chosen[hole]

    return _HOLE.sub(variable, template)


def _fits(template: str, live: list[str]) -> bool:
    return all(any(v[0] == kind for v in live) for kind, _ in _HOLE.findall(template))


@st.composite
def programs(draw: Draw, behind: bool = False) -> Program:
    """A forward of up to sixteen statements, and one or two steps with it.

    Args:
        behind: Whether inputs are changed behind autograd's back between forward and backward.
    """
    dtype = draw(st.sampled_from(["float32", "float32", "float64"]))
    live = [*BASE]
    lines: list[str] = []
    for number in range(16):
        if number and draw(st.integers(0, 11)) == 0:
            break
        kind = draw(st.sampled_from("nnnnneeezzzqqvvhbm!"))
        if kind == "!":
            fits = [t for t in CHANGES if _fits(t, live)]
            line = _fill(draw, draw(st.sampled_from(fits)), live)
            if line.startswith("del "):
                live.remove(line.removeprefix("del "))
                if not any(v[0] == "n" for v in live):
                    live.append("n0")
            lines.append(line)
            continue
        fits = [t for t in EXPRESSIONS[kind] if _fits(t, live)]
        if not fits:
            continue
        name = f"{kind}{len(BASE) + number}"
        lines.append(f"{name} = {_fill(draw, draw(st.sampled_from(fits)), live)}")
        live.append(name)
    text = "\n".join(lines)
    made = [v for v in live if v not in BASE and v[0] != "m"]
    # What nothing has read; otherwise it would get no gradient.
    ends = [v for v in made if len(re.findall(rf"\b{v}\b", text)) == 1] or made[-1:]
    outputs = ends[-4:] or [v for v in live if v[0] == "n"][:1]
    if made and draw(st.integers(0, 3)) == 0:
        outputs.append(draw(st.sampled_from(made)))
    shown = [f"torch.view_as_real({v}.resolve_conj())" if v[0] == "z" else v for v in outputs]
    end = f"return ({', '.join(shown)},)"
    bound = [n for n in BASE if re.search(rf"\b{n}\b", f"{text}\n{end}")]
    whole = [f"{name} = {BASE[name]}" for name in bound] + text.split("\n") + [end]
    source = PREAMBLE.replace("{dtype}", dtype)
    text = "\n".join(whole)
    for name, made in PARTS.items():
        if f"self.{name}" in text:
            source += f"        {made}\n"
    source += "\n    def forward(self, x, y, c, i, p, sparse):\n"
    source += "".join(f"        {line}\n" for line in whole if line)
    source += "\n\ndef build():\n    return Net()\n\n\ndef train(model, record):\n"
    for step in range(draw(st.integers(1, 2))):
        source += "".join(f"    {line}\n" for line in _step(draw, step, behind))
    return Program(source)


def _step(draw: Draw, step: int, behind: bool) -> list[str]:
    """Inputs, forward, perhaps an edit, and backward."""
    seed = 10 * step
    lines = [
        f"x, y = normal({seed + 5}, N, C), normal({seed + 6}, N, C)",
        f"c = torch.complex(normal({seed + 7}, N, C), normal({seed + 8}, N, C))",
        f"i = torch.randint(N, (E,), generator=torch.Generator().manual_seed({seed}))",
        f"p = torch.randperm(N, generator=torch.Generator().manual_seed({seed}))",
        "sparse = torch.eye(N).to_sparse()",
    ]
    lines += draw(
        st.sampled_from(
            [
                [],
                [],
                [],
                ["x = x * 30"],
                ["x = x.t().contiguous().t()"],
                ["x = x.abs()"],
                ["i = i.int()"],
            ]
        )
    )
    learns = draw(st.sampled_from([[], ["y"], ["x", "y"]]))
    lines += [f"{name}.requires_grad_()" for name in learns]
    lines.append(draw(st.sampled_from(["model.train()"] * 4 + ["model.eval()"])))
    lines.append("out = model(x, y, c, i, p, sparse)")
    edits = [
        [],
        ["with torch.no_grad():", "    x.mul_(0.5)"],
        ["with torch.no_grad():", "    model.w.mul_(0.5)"],
        ["out[0].data.mul_(0.5)"],
        ["i.fill_(0)"],
    ]
    if behind:
        lines += draw(st.sampled_from([["x.data.mul_(0.5)"], ["p.numpy()[:] = 0"]]))
    elif draw(st.integers(0, 3)) == 0:
        lines += draw(st.sampled_from(edits))
    backward = draw(st.sampled_from(["once", "once", "once", "twice", "one by one", "grad"]))
    inputs = "".join(f", {name}={name}" for name in learns)
    return [*lines, f"finish(model, record, {backward!r}, out{inputs})"]

"""Gradients of many operations: exact if nothing is quantized, and right on average at 4 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from samples import Lambda, equal, one_thread, seeded  # noqa: F401
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_graph

SIZE = 64
few_or_many_draws = pytest.mark.parametrize(
    ("draws", "bound"), [(20, 0.1), pytest.param(80, 0.05, marks=pytest.mark.long)]
)
"""A mean has half the noise over four times the draws."""


def heads(h):
    """[64, 64] as [batch 4, heads 4, 16 tokens, 16 channels]."""
    return h.view(4, 16, 4, 16).transpose(1, 2)


def own(function):
    """An operation with a module, which has the same parameters at each call."""

    def operation(h):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            module = function()
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        return module(h)

    return operation


class Attention(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.layer = nn.MultiheadAttention(SIZE, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, h):
        h = 3 * h.view(4, 16, SIZE)
        return self.layer(h, h, h, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(SIZE, SIZE, batch_first=True)

    def forward(self, h):
        return self.layer(h.view(4, 16, SIZE))[0]


def attention(h, **options):
    q, k, v = heads(2 * h), heads(2 * h.flip(0)), heads(h.flip(1))
    return F.scaled_dot_product_attention(q, k, v, **options)


def made_of_several(h):
    with sdpa_kernel(SDPBackend.MATH):
        return attention(h)


def with_bias(h):
    return attention(h, attn_mask=h[:16, :16])


def spd(h):
    return h @ h.T / SIZE + 4 * torch.eye(SIZE)


def positive(h):
    return F.softplus(h) + 0.01


OPERATIONS = {
    "sdpa": attention,
    "sdpa math": made_of_several,
    "sdpa causal": lambda h: attention(h, is_causal=True),
    "sdpa sharp": lambda h: attention(3 * h),
    "sdpa of the bias": with_bias,
    "multi-head attention": own(Attention),
    "multi-head attention weights": own(lambda: Attention(need_weights=True)),
    "transformer layer": own(
        lambda: nn.Sequential(
            nn.Unflatten(0, (4, 16)),
            nn.TransformerEncoderLayer(SIZE, 4, 64, dropout=0.0, batch_first=True),
        )
    ),
    "normalize p=1": lambda h: F.normalize(h, p=1.0, dim=1),
    "normalize p=3": lambda h: F.normalize(h, p=3.0, dim=1),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h.flip(0), dim=1),
    "pairwise_distance": lambda h: F.pairwise_distance(h, h.flip(1)),
    "cdist": lambda h: torch.cdist(h, h.flip(1)),
    "pdist": lambda h: F.pdist(h),
    "dist": lambda h: torch.dist(h, h.flip(1)),
    "layer_norm": lambda h: F.layer_norm(h, (SIZE,)),
    "group_norm": lambda h: F.group_norm(h, 4),
    "instance_norm": lambda h: F.instance_norm(h.view(4, 16, SIZE)),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "rms_norm": lambda h: F.rms_norm(h, (SIZE,)),
    "weight_norm": lambda h: torch._weight_norm(h * 1, h.norm(dim=1, keepdim=True), 0),
    "softmax": lambda h: F.softmax(2 * h, 1),
    "log_softmax": lambda h: F.log_softmax(4 * h, 1),
    "logsumexp": lambda h: torch.logsumexp(4 * h, 1),
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 1),
    "logaddexp": lambda h: torch.logaddexp(3 * h, 3 * h.flip(1)),
    "logsigmoid": lambda h: F.logsigmoid(3 * h),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, dim=1),
    "square": lambda h: h.square(),
    "pow 3": lambda h: h**3,
    "number to the power": lambda h: 2.0**h,
    "addcmul": lambda h: torch.addcmul(h, h.flip(0), h.flip(1)),
    "lerp": lambda h: torch.lerp(h, h.flip(0), h.flip(1)),
    "exp": lambda h: h.exp(),
    "expm1": lambda h: h.expm1(),
    "sinh": lambda h: (3 * h).sinh(),
    "cosh": lambda h: (3 * h).cosh(),
    "sin": lambda h: h.sin(),
    "atan": lambda h: h.atan(),
    "erf": lambda h: (h / 2).erf(),
    "sinc": lambda h: torch.sinc(h),
    "softsign": lambda h: F.softsign(h),
    "softshrink": lambda h: F.softshrink(h),
    "hardshrink": lambda h: F.hardshrink(h),
    "hardsigmoid": lambda h: F.hardsigmoid(2 * h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu inplace": lambda h: F.rrelu(h * 1, training=True, inplace=True),
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, True),
    "selu": lambda h: F.selu(h),
    "glu": lambda h: F.glu(h),
    "var": lambda h: h.var(1),
    "std": lambda h: h.std(1),
    "std_mean": lambda h: torch.stack(torch.std_mean(h, 1)),
    "norm": lambda h: h.norm(dim=1),
    "norm 1": lambda h: h.norm(p=1, dim=1),
    "norm 3": lambda h: torch.linalg.vector_norm(h, 3, dim=1),
    "matrix norm": lambda h: torch.linalg.matrix_norm(h),
    "spectral norm": lambda h: torch.linalg.norm(h, 2),
    "prod": lambda h: (1 + h / 8).prod(1),
    "cumprod": lambda h: (1 + h / 8).cumprod(1),
    "nansum": lambda h: h.square().nansum(1),
    "renorm": lambda h: h.renorm(2, 0, 4.0),
    "einsum": lambda h: torch.einsum("ij,kj,ki->k", h, h, h),
    "matmul": lambda h: h @ h.T,
    "broadcast matmul": lambda h: h.view(4, 16, SIZE) @ h,
    "bilinear": lambda h: F.bilinear(h, h.flip(1), h.new_ones(3, SIZE, SIZE)),
    "conv1d": lambda h: F.conv1d(h.view(4, 16, SIZE), h[:12].view(16, 16, 3)),
    "grid_sample": lambda h: F.grid_sample(
        h.view(1, 1, SIZE, SIZE), h.view(1, 64, 32, 2) / 4, align_corners=False
    ),
    "embedding_bag": lambda h: F.embedding_bag(
        torch.arange(SIZE).view(16, 4), h, per_sample_weights=h[:16, :4].contiguous(), mode="sum"
    ),
    "max_pool1d": lambda h: F.max_pool1d(h.view(4, 16, SIZE), 2),
    "lstm": own(lambda: Recurrent(nn.LSTM)),
    "gru": own(lambda: Recurrent(nn.GRU)),
    "inverse": lambda h: torch.linalg.inv(spd(h)),
    "cholesky": lambda h: torch.linalg.cholesky(spd(h)),
    "solve": lambda h: torch.linalg.solve(spd(h), h),
    "slogdet": lambda h: torch.linalg.slogdet(spd(h)).logabsdet,
    "svdvals": lambda h: torch.linalg.svdvals(h + 8 * torch.diag(torch.arange(64.0))),
    "eigvalsh": lambda h: torch.linalg.eigvalsh(spd(h) + 8 * torch.diag(torch.arange(64.0))),
    "qr": lambda h: torch.linalg.qr(spd(h)).R,
    "matrix_exp": lambda h: torch.linalg.matrix_exp(h / 32),
    "pinv": lambda h: torch.linalg.pinv(spd(h)),
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "complex": lambda h: (torch.complex(h, h.flip(0)) * torch.complex(h.flip(1), h)).angle(),
    "ctc_loss": lambda h: F.ctc_loss(
        F.log_softmax(h.view(16, 4, SIZE), -1),
        torch.arange(1, 17).view(4, 4),
        (16,) * 4,
        (4,) * 4,
    ),
    "kl_div of positives": lambda h: F.kl_div(
        h.log_softmax(1), h.flip(1).softmax(1), reduction="sum"
    ),
}
# Of 1e-4 to 1e4 in each group,
WIDE = {
    "normalize": lambda h: F.normalize(h, dim=1),
    "div": lambda h: h.new_ones(()) / h,
    "div of both": lambda h: h.flip(0) / h,
    "reciprocal": lambda h: 1 / h,
    "log": lambda h: h.log(),
    "sqrt": lambda h: h.sqrt(),
    "rsqrt": lambda h: h.rsqrt(),
    "pow 0.5": lambda h: h**0.5,
    "pow -1": lambda h: h**-1,
    "float_power": lambda h: torch.float_power(h, 1.5),
    "addcdiv": lambda h: torch.addcdiv(h, h.flip(0), h.flip(1)),
    "xlogy": lambda h: torch.xlogy(h, h.flip(1)),
    "atan2": lambda h: torch.atan2(h, h.flip(1)),
    "hypot": lambda h: torch.hypot(h, h.flip(1)),
    "lgamma": lambda h: h.lgamma(),
    "digamma": lambda h: h.digamma(),
    "norms": lambda h: h.norm(dim=1),
}
# and from -0.999 to 0.999.
UNIT = {
    "log1p": lambda h: h.log1p(),
    "tan": lambda h: (1.57 * h).tan(),
    "asin": lambda h: h.asin(),
    "acos": lambda h: h.acos(),
    "atanh": lambda h: h.atanh(),
    "erfinv": lambda h: h.erfinv(),
    "logit": lambda h: ((h + 1) / 2).logit(),
    "power of tensors": lambda h: (h + 1) ** h.flip(1),
}
ALL = OPERATIONS | WIDE | UNIT


def gradients(name, draws=1, **options):
    """The gradient of the operation's input, for each draw of the noise."""
    function = ALL[name]
    model = Lambda(lambda module, x: function(x * module.scale))
    model.scale = nn.Parameter(torch.ones(()))
    x = torch.randn(SIZE, SIZE, generator=seeded(1))
    if name in WIDE:
        x = (9 * x.tanh()).exp()
    elif name in UNIT:
        x = 0.999 * x.tanh()
    if options:
        gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
    for _ in range(draws):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        out = model(leaf)
        out.backward(torch.randn(out.shape, generator=seeded(2), dtype=torch.float64).to(out))
        yield leaf.grad


@pytest.mark.parametrize("name", ALL)
class TestGradients:
    def test_lossless_is_exact(self, name):
        assert equal([*gradients(name, level="lossless", bits=32)], [*gradients(name)])

    @few_or_many_draws
    def test_4_bits_are_right_on_average(self, name, draws, bound):
        [expected] = gradients(name)
        drawn = torch.stack([*gradients(name, draws, bits=4)])
        assert drawn.isfinite().all()
        error = (drawn.mean(0) - expected).norm() / expected.norm()
        assert error < bound


class TestSavedBeforeItIsWritten:
    @pytest.mark.parametrize("inplace", [False, True])
    def test_noise_of_rrelu(self, inplace):
        """It lies in memory that held other numbers when autograd saves it."""

        def step(**options):
            model = Lambda(
                lambda module, x: F.rrelu(x * module.scale, training=True, inplace=inplace)
            )
            model.scale = nn.Parameter(torch.ones(()))
            if options:
                gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
            leaf = torch.randn(SIZE, SIZE, generator=seeded(1)).requires_grad_()
            torch.manual_seed(3)
            freed = [torch.full((SIZE, SIZE), 7.0) for _ in range(20)]
            del freed
            model(leaf).sum().backward()
            return leaf.grad

        expected = step()
        for _ in range(5):
            assert torch.equal(step(level="lossless", bits=32), expected)
            assert (step(bits=8) - expected).abs().max() < 0.01


class TestAttentionAtFewBits:
    @pytest.mark.filterwarnings("ignore:With bits=1 ")
    @pytest.mark.parametrize("bits", [1, 2])
    @pytest.mark.parametrize(
        "name", ["sdpa", "sdpa math", "sdpa causal", "sdpa sharp", "multi-head attention"]
    )
    @few_or_many_draws
    def test_has_no_bias(self, name, bits, draws, bound):
        """Scores with noise, exponentiated against an exact normalizer, gave 1e8 times too much."""
        [expected] = gradients(name)
        drawn = torch.stack([*gradients(name, draws, bits=bits)])
        along = (drawn.mean(0) * expected).sum() / expected.square().sum()
        assert abs(along - 1) < bound

    def test_contexts_of_multi_head_attention_have_the_names_of_its_operations(self):
        model = Lambda(lambda module, x: OPERATIONS["multi-head attention"](x @ module.weight))
        model.weight = nn.Parameter(torch.eye(SIZE))
        gact_graph.wrap(model, bits=2, min_bytes=0)
        model(torch.randn(SIZE, SIZE))
        widths = {row.slot: row.bits for row in gact_graph.report(model).contexts}
        place = "scaled_dot_product_attention"
        assert (widths[f"{place}.query"], widths[f"{place}.key"]) == (16, 16)
        assert widths[f"{place}.value"] == 8
        assert widths[f"{place}.logsumexp"] is None  # the normalizer

"""Divisors and exponents of backward: their error is relative to each element."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from samples import FEATURES, Lambda, one_thread, seeded  # noqa: F401
from torch import Tensor

import gact_graph
from gact_graph.codecs import encode
from gact_graph.codecs.codec import Request
from gact_graph.codecs.reads import Values


def rounded(x: Tensor, bits: int = 4):
    request = Request(
        tensor=x,
        slot="div.other",
        operation="div",
        reads=Values(relative=True),
        recipe=None,
        keep=lambda source: pytest.fail("nothing was gathered"),
        bits=bits,
        group_size=256,
        seed=1,
    )
    return encode(request, lossless=True, lossy=True)


class TestCodec:
    @pytest.mark.parametrize(
        ("dtype", "error", "least"), [(torch.float32, 2**-8, -37), (torch.float64, 2**-20, -300)]
    )
    def test_the_error_is_relative_to_each_element(self, dtype, error, least):
        powers = torch.linspace(least, -least, 5000, dtype=torch.float64)
        x = (10.0**powers * torch.tensor([1, -1]).repeat(2500)).to(dtype)
        form = rounded(x)
        assert form.codec == "round"
        assert (form.bits, form.nbytes) == (8 * dtype.itemsize // 2, x.nbytes // 2)
        assert ((form.decode() - x) / x).abs().max() <= error

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_special_values(self, dtype):
        most = torch.finfo(dtype).max
        x = torch.tensor([0.0, -0.0, math.inf, -math.inf, most, -most, math.nan], dtype=dtype)
        back = rounded(x).decode()
        assert back.dtype == dtype
        assert torch.equal(back[:4], x[:4]) and torch.equal(back[:6].signbit(), x[:6].signbit())
        assert back[4:6].isfinite().all() and back[6].isnan()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_kept(self, dtype):
        assert rounded(torch.randn(5000).to(dtype)).codec == "keep"

    def test_no_loss_is_kept(self):
        assert rounded(torch.randn(5000), bits=32).codec == "keep"


def spread() -> Tensor:
    """Positive numbers [300, 32] from 1e-9 to 1e3, in no order."""
    powers = torch.linspace(-9, 3, 9600)[torch.randperm(9600, generator=seeded(3))]
    return (10.0**powers).view(300, 32)


FUNCTIONS = {
    "quotient": lambda h: 1e-3 / h,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "power below 1": lambda h: h**0.3,
    "negative power": lambda h: h.pow(-2),
}


def gradient(function, x: Tensor, **options) -> Tensor:
    # The additions keep apart what the function saves, the input and the output, which are kept.
    model = Lambda(lambda module, x: function(x + 0) + 0)
    if options:
        gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
    for _ in range(2 if options else 1):  # the first step is exact, as x needs a gradient
        x = x.detach().clone().requires_grad_()
        out = model(x)
        out.backward(torch.randn(out.shape, generator=seeded(2)))
    return x.grad


class TestGradient:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_each_element_has_a_small_relative_error(self, name):
        """In 16 bits of a scale that 256 elements share, the small ones were anything."""
        exact = gradient(FUNCTIONS[name], spread())
        got = gradient(FUNCTIONS[name], spread(), bits=4)
        assert not torch.equal(got, exact)
        assert ((got - exact) / exact).abs().max() < 0.02

    def test_log_softmax_of_large_logits(self):
        def loss(h):
            return F.nll_loss(F.log_softmax(h, dim=1), torch.arange(300) % FEATURES)

        logits = 18 * torch.randn(300, FEATURES, generator=seeded(1))
        exact, got = gradient(loss, logits), gradient(loss, logits, bits=4)
        assert (got - exact).norm() < 0.01 * exact.norm()

"""Conjugate and negative views, and real views of complex tensors: as stock at all levels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from samples import Lambda, equal, seeded
from torch import nn

import gact_graph

ROWS = torch.arange(2000).remainder(500)
LEVELS = {
    "L0": {"level": "L0"},
    "lossless": {"level": "lossless", "bits": 32},
    "L1": {"level": "L1", "bits": 32},
}


@pytest.fixture(autouse=True)
def deterministic():
    """Several threads sum the gradient of ``z[ROWS]`` in an order that differs between runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def conjugate_beside_its_base(z):
    c = z.conj()
    return (z * c * z).abs()


def conjugate_twice(z):
    c = z.conj()
    return (c * c.conj() * c).abs()


def negative_view(z):
    n = z.conj().imag
    return n * z.imag * n


def negative_view_of_a_conjugate(z):
    return z.conj().imag.contiguous() * z.conj().imag * z.real


def gathered_negative(z):
    rows = z.imag.contiguous()[ROWS]
    negative = torch._neg_view(rows)
    return negative * rows * negative


def gathered_from_a_negative(z):
    rows = z.conj().imag.index_select(0, ROWS)
    return rows * rows * torch._neg_view(rows)


def gathered_conjugate(z):
    rows = z.index_select(0, ROWS)
    return (rows.conj() * rows * z.conj().index_select(0, ROWS)).abs()


def sides_of_a_negative(z):
    n = z.conj().imag
    sides = n.clamp(-0.5, 0.7), n.clamp_min(0.1), F.hardtanh(n, -0.3, 0.8), F.leaky_relu(n)
    return sum(sides) * F.threshold(z.conj().imag, 0.2, 0.0)


def sides_of_rows_of_a_negative(z):
    rows = z.imag.contiguous()[ROWS]
    return torch._neg_view(rows).clamp(-0.5, 0.7) + F.leaky_relu(rows)


def real_views(z):
    both = torch.view_as_real(z)
    return (both[..., 0] * z.real * both.sum(-1)) * torch.view_as_real(z * z).prod(-1)


def complex_view(z):
    pairs = torch.view_as_real(z) * 2
    w = torch.view_as_complex(pairs)
    return (w * w.conj() * z).abs() * pairs[..., 1]


def transposed_conjugate(z):
    return (z.mH @ z @ z.t()).abs()


def conjugate_of_columns(z):
    some = z[:, ::2].conj()
    return (some * z[:, ::2] * some).abs()


def what_is_given_is_saved_as_real(z):
    # The result lives on in the caller's hands, and the product saved a real view of it.
    w = z * z
    part = torch.view_as_real(w).reshape(-1)
    return part * part, w


PROGRAMS = (
    conjugate_beside_its_base,
    conjugate_twice,
    negative_view,
    negative_view_of_a_conjugate,
    gathered_negative,
    gathered_from_a_negative,
    gathered_conjugate,
    sides_of_a_negative,
    sides_of_rows_of_a_negative,
    real_views,
    complex_view,
    transposed_conjugate,
    conjugate_of_columns,
    what_is_given_is_saved_as_real,
)


def step(program, leaf=True, **options):
    model = Lambda(lambda module, z: program(z * module.scale))
    model.scale = nn.Parameter(torch.tensor(1.5 - 0.5j))
    z = torch.randn(500, 32, dtype=torch.complex64, generator=seeded(1)).requires_grad_(leaf)
    if options:
        gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
    out = model(z)
    out, *others = out if isinstance(out, tuple) else (out,)
    out.backward(torch.randn(out.shape, generator=seeded(2)))
    del others
    return [z.grad, model.scale.grad]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_stock(program, level):
    assert equal(step(program, **LEVELS[level]), step(program))


def test_codes_of_a_negative_view_keep_the_sign():
    def program(z):
        z = z.exp()
        return (z.conj().imag.contiguous() * 2) * torch._neg_view(z.imag * 3)

    # The gradient of an input would have to be exact.
    _, expected = step(program, leaf=False)
    _, gradient = step(program, leaf=False, bits=16)
    assert 0 < (gradient - expected).abs() < 1e-3 * expected.abs()

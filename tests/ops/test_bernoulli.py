"""The noise of dropout: PyTorch's bits, and its generator's state afterwards."""

import pytest
import torch
from torch import Tensor

from gact_graph.ops import bernoulli
from gact_graph.ops.bernoulli import dropout_noise
from gact_graph.ops.reference import bernoulli as reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

pytestmark = pytest.mark.skipif(
    not bernoulli.draws_as_torch(), reason="this PyTorch has another generator here (MKL on Intel)"
)


def _torch_noise(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


# 312 numbers to a state of the generator; 64 bits to a word.
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 311, 312, 313, 10_000])
@pytest.mark.parametrize("before", [0, 1, 2, 623, 624], ids="{} words before".format)
def test_equals_noise_of_torch(numel: int, before: int) -> None:
    for p, dtype in zip((0.5, 0.1, 0.7, 1e-12), _DTYPES, strict=True):
        torch.manual_seed(numel)
        torch.randint(2, (before,), dtype=torch.int32)  # one word of the generator each
        x, state = torch.empty(numel, dtype=dtype), torch.get_rng_state()
        expected, expected_state = _torch_noise(x, p), torch.get_rng_state()
        torch.set_rng_state(state)
        noise = dropout_noise(x, p)
        assert noise is not None
        assert torch.equal(noise.tensor(x.shape, dtype), expected)
        assert torch.equal(torch.get_rng_state(), expected_state)


@pytest.mark.parametrize("p", [0.0, 2.0**-53, 0.25, 1 - 2.0**-53, 1.0])
def test_extreme_probabilities(p: float) -> None:
    drawn = []
    for draw in (torch.ops.gact_graph.draw_bits, reference.draw_bits):
        state, words = torch.Generator().manual_seed(2).get_state(), torch.zeros(16).long()
        draw(state, words, 1_000, p)
        drawn.append((state, words))
    assert all(map(torch.equal, *drawn))


def _noise(x: Tensor, p: float) -> Tensor:
    noise = dropout_noise(x, p)
    assert noise is not None
    return noise.tensor(x.shape, x.dtype)


def test_other_random_functions_continue() -> None:
    x, drawn = torch.empty(1_000), list[list[Tensor]]()
    for noise in (_torch_noise, _noise):
        torch.manual_seed(5)
        first = torch.randn(1)  # leaves a second number in the state
        drawn.append([first, noise(x, 0.4), torch.randn(3), torch.rand(3), torch.randperm(9)])
    assert all(map(torch.equal, *drawn))


def test_no_noise_where_torch_draws_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bernoulli, "draws_as_torch", lambda: False)
    state = torch.get_rng_state()
    assert dropout_noise(torch.empty(10), 0.5) is None
    assert torch.equal(torch.get_rng_state(), state)

"""Seeds of noise: a dither over the forwards of one graph, fresh noise for other batches."""

from __future__ import annotations

import torch

from gact_graph.capture.noise import Noise
from gact_graph.ops.quantize import pack
from gact_graph.ops.reference.quantize import noise16

INDEX = torch.arange(2000)


def _noise(forward: int, repeated: bool = True, slot: str = "a", seed: int = 0) -> torch.Tensor:
    return noise16(INDEX, Noise(seed, forward, repeated).seed_of(slot)).double() / 2**16


def test_the_noise_of_consecutive_forwards_is_evenly_spread() -> None:
    """The largest gap between n points of a circle is at most 1.9 / n."""
    for first in (0, 7, 2**16 - 5):
        for count in (2, 5, 13, 34):
            points = torch.stack([_noise(first + step) for step in range(count)]).sort(0).values
            gaps = torch.diff(points, dim=0, append=points[:1] + 1)
            assert gaps.max() <= 1.9 / count


def test_the_first_forward_decides_nothing_about_other_slots_and_seeds() -> None:
    for other in (_noise(3, slot="b"), _noise(3, seed=1)):
        assert abs(torch.corrcoef(torch.stack([_noise(3), other]))[0, 1]) < 6 / len(INDEX) ** 0.5


def test_noise_of_other_batches_is_fresh() -> None:
    pairs = torch.stack([_noise(3, repeated=False), _noise(4, repeated=False)])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 6 / len(INDEX) ** 0.5


def test_the_mean_of_a_tensor_over_few_forwards_is_near_the_tensor() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))

    def error(repeated: bool) -> float:
        seeds = (Noise(0, forward, repeated).seed_of("a") for forward in range(13))
        mean = torch.stack([pack(x, 2, seed=seed).unpack() for seed in seeds]).mean(0)
        return float((mean - x).square().mean())

    # A 13th of the variance is left of independent draws, and less than 1 / 50 of spread ones.
    assert error(repeated=True) < 0.2 * error(repeated=False)

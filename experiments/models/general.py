"""Small networks and data for images and texts, as in the GACT paper, without a download.

Images are scikit-learn's digits, for torchvision's ResNets or a smaller residual network, and for a
vision transformer. Texts are excerpts of Python's own documentation, for a transformer in the shape
of BERT that finds the topic of each.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.helpers.errors import UsageError
from experiments.models.small import Bert, VisionTransformer, digits, residual_network

_HELD_OUT = 0.1
_TOPICS = 8  # the longest
_LENGTH = 32  # words of an excerpt
_RARE = 3  # words with fewer occurrences are all alike
_SIDE = 32  # pixels of an image for torchvision's ResNets, which halve it five times


@dataclass(frozen=True)
class Field:
    """A network and its data.

    Attributes:
        network: The name of the network.
        make: Makes a network with fresh weights.
        batch: Draws a training batch of so many examples: inputs and classes.
        held_out: The inputs and classes for the score, which are always the same.
        lr: The learning rate of Adam.
    """

    network: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    lr: float


def excerpts() -> tuple[Tensor, Tensor]:
    """Return excerpts of the longest topics of Python's documentation.

    Returns:
        Words [n, L] int64, the most common one 1, rare ones 0; and topics [n] int64.
    """
    from pydoc_data.topics import topics

    longest = sorted(sorted(topics), key=lambda name: -len(topics[name]))[:_TOPICS]
    texts = [re.findall(r"\w+|[^\w\s]+", topics[name].lower()) for name in longest]
    counts = Counter(word for text in texts for word in text)
    known = [word for word, count in counts.most_common() if count >= _RARE]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    words = [torch.tensor([numbers.get(word, 0) for word in text]) for text in texts]
    pieces = [text[: len(text) // _LENGTH * _LENGTH].view(-1, _LENGTH) for text in words]
    sizes = torch.tensor([len(piece) for piece in pieces])
    return torch.cat(pieces), torch.arange(_TOPICS).repeat_interleave(sizes)


def texts() -> Field:
    """Return BERT over excerpts of documentation."""
    words, topics = excerpts()
    vocabulary = int(words.max()) + 1
    return _field("bert", lambda: Bert(vocabulary, _TOPICS, _LENGTH), words, topics, 5e-4)


def images() -> Field:
    """Return torchvision's ResNet-18 over digits, or a smaller network without torchvision."""
    try:
        return resnet("resnet18")
    except UsageError:
        return _field("resnet", residual_network, *digits(), 1e-3)


def patches() -> Field:
    """Return a vision transformer over digits."""
    x, y = digits()
    return _field("vit", lambda: VisionTransformer(x.size(-1), 10), x, y, 5e-4)


def resnet(network: str) -> Field:
    """Return a ResNet of torchvision over digits enlarged to 32 x 32, with random weights.

    Raises:
        UsageError: If torchvision does not import.
    """
    try:
        from torchvision import models
    # Builds of torch and torchvision that do not fit together fail with RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"Expected torchvision for {network} (got {error}): install the release for this torch "
            "from the index that torch came from, or take --model resnet"
        ) from error
    x, y = digits()
    x = F.interpolate(x, size=(_SIDE, _SIDE), mode="bilinear").expand(-1, 3, -1, -1)
    return _field(network, lambda: getattr(models, network)(num_classes=10), x, y, 1e-3)


def _field(network: str, make: Callable[[], nn.Module], x: Tensor, y: Tensor, lr: float) -> Field:
    """Split the examples, the same way each time."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    split = int(len(y) * (1 - _HELD_OUT))
    known, held = order[:split], order[split:]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = known[torch.randint(split, (size,), generator=generator)]
        return x[chosen], y[chosen]

    return Field(network, make, batch, (x[held], y[held]), lr)


FIELDS: dict[str, Callable[[], Field]] = {
    "resnet": images,
    "resnet18": functools.partial(resnet, "resnet18"),
    "resnet50": functools.partial(resnet, "resnet50"),
    "bert": texts,
    "vit": patches,
}


@torch.no_grad()
def score_of(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    """Return the share of right classes; the model is left in evaluation mode."""
    model.eval()
    inputs, classes = held_out
    return float((model(inputs).argmax(1) == classes).double().mean())

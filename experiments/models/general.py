"""The paper's other two fields, small and without a download: images and texts.

Images are scikit-learn's digits, for a residual network. Texts are Python's own documentation, for
a transformer in the shape of BERT that fills in characters, as BERT fills in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.small import residual_network

_HELD_OUT = 0.1
_MASKED = 0.15  # of the characters of a text, as in BERT
_FIRST, _LAST = 32, 126  # printable ASCII
_OTHER = _LAST - _FIRST + 1
_MASK = _OTHER + 1
_CHARACTERS = _MASK + 1


@dataclass(frozen=True)
class Field:
    """A network and its data.

    Attributes:
        make: A network with fresh weights.
        batch: A training batch of so many examples: inputs and targets, -100 where none is asked.
        held_out: The same, for the score; always the same ones.
        lr: Of Adam.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    lr: float


class CharacterBert(nn.Module):
    """Embeddings of characters and places, a transformer encoder, and logits for each place.

    Shapes:
        - **input**: characters [B, L] int64
        - **output**: logits [B, C, L] float32
    """

    def __init__(self, length: int, hidden: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.character = nn.Embedding(_CHARACTERS, hidden)
        self.place = nn.Embedding(length, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, _CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.size(1), device=characters.device)
        x = self.layers(self.norm(self.character(characters) + self.place(places)))
        logits: Tensor = self.head(x).transpose(1, 2)
        return logits


def documentation() -> Tensor:
    """Python's documentation of its language, as characters [n] int64."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    raw = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    return torch.where((raw >= _FIRST) & (raw <= _LAST), raw - _FIRST, _OTHER)


def masked(texts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts [B, L] with some characters hidden, and what these were; -100 at all others."""
    hidden = torch.rand(texts.shape, generator=generator) < _MASKED
    return texts.masked_fill(hidden, _MASK), texts.masked_fill(~hidden, -100)


def texts(length: int = 96) -> Field:
    """BERT over documentation."""
    characters = documentation()
    split = int(len(characters) * (1 - _HELD_OUT))
    training = characters[:split]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(split - length, (size,), generator=generator)
        chosen = training[starts[:, None] + torch.arange(length)]
        return masked(chosen, generator)

    rest = characters[split:]
    rest = rest[: len(rest) // length * length].view(-1, length)[:256]
    held_out = masked(rest, torch.Generator().manual_seed(0))
    return Field(lambda: CharacterBert(length), batch, held_out, 1e-3)


def images() -> Field:
    """A residual network over digits of 8 x 8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.as_tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    split = int(len(y) * (1 - _HELD_OUT))
    known, held = order[:split], order[split:]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = known[torch.randint(split, (size,), generator=generator)]
        return x[chosen], y[chosen]

    return Field(residual_network, batch, (x[held], y[held]), 1e-3)


FIELDS: dict[str, Callable[[], Field]] = {"resnet": images, "bert": texts}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of what was asked for."""
    return F.cross_entropy(logits, targets)


@torch.no_grad()
def score_of(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    """The share of what was asked for that is right; the model is left in evaluation mode."""
    model.eval()
    inputs, targets = held_out
    asked = targets != -100
    return float((model(inputs).argmax(1)[asked] == targets[asked]).double().mean())

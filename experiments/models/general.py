"""The paper's other two fields, small and without a download: images and texts.

Images are scikit-learn's digits, for a residual network. Texts are excerpts of Python's own
documentation, for a transformer in the shape of BERT that tells which topic each is from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.models.small import residual_network

_HELD_OUT = 0.1
_TOPICS = 8  # the longest
_LENGTH = 32  # words of an excerpt
_RARE = 3  # words that come less often are all alike


@dataclass(frozen=True)
class Field:
    """A network and its data.

    Attributes:
        make: A network with fresh weights.
        batch: A training batch of so many examples: inputs and classes.
        held_out: The same, for the score; always the same ones.
        lr: Of Adam.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    lr: float


class Bert(nn.Module):
    """Embeddings of words and places, a transformer encoder, and logits of the mean over places.

    Shapes:
        - **input**: words [B, L] int64
        - **output**: logits [B, C] float32
    """

    def __init__(
        self, words: int, classes: int, hidden: int = 128, layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(words, hidden)
        self.place = nn.Embedding(_LENGTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.size(1), device=words.device)
        x = self.layers(self.norm(self.word(words) + self.place(places)))
        logits: Tensor = self.head(x.mean(1))
        return logits


def excerpts() -> tuple[Tensor, Tensor]:
    """Excerpts of the longest topics of Python's documentation.

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
    """BERT over excerpts of documentation."""
    words, topics = excerpts()
    vocabulary = int(words.max()) + 1
    return _field(lambda: Bert(vocabulary, _TOPICS), words, topics, 5e-4)


def images() -> Field:
    """A residual network over digits of 8 x 8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return _field(residual_network, x, torch.as_tensor(digits.target), 1e-3)


def _field(make: Callable[[], nn.Module], x: Tensor, y: Tensor, lr: float) -> Field:
    """Splits the examples, the same way each time."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    split = int(len(y) * (1 - _HELD_OUT))
    known, held = order[:split], order[split:]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = known[torch.randint(split, (size,), generator=generator)]
        return x[chosen], y[chosen]

    return Field(make, batch, (x[held], y[held]), lr)


FIELDS: dict[str, Callable[[], Field]] = {"resnet": images, "bert": texts}


@torch.no_grad()
def score_of(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    """The share of classes that is right; the model is left in evaluation mode."""
    model.eval()
    inputs, classes = held_out
    return float((model(inputs).argmax(1) == classes).double().mean())

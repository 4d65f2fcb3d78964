"""GCN, GAT and GCNII, each made from a recipe.

`GCN <https://arxiv.org/abs/1609.02907>`_, `GAT <https://arxiv.org/abs/1710.10903>`_ and `GCNII
<https://arxiv.org/abs/2007.02133>`_, with batch norm, ReLU and dropout after each hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv

from experiments.helpers.recipes import Recipe


class Stack(nn.Module):
    """Convolutions, each but the last followed by batch norm, ReLU and dropout.

    Shapes:
        - **input**: x [N, F] float32; adjacency, a normalized sparse CSR [N, N] float32, or
          ``edge_index`` [2, E] int64
        - **output**: logits [N, C] float32
    """

    def __init__(self, convs: Sequence[nn.Module], widths: Sequence[int], recipe: Recipe) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(recipe.input_dropout)
        self.convs = nn.ModuleList(convs)
        self.norms = _norms(widths, recipe)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.input_dropout(x)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.dropout(self.relu(norm(conv(x, adjacency))))
        return self.convs[-1](x, adjacency)


class GCNII(nn.Module):
    r"""A linear layer in, convolutions of one width, a linear layer out.

    Convolution :math:`\ell` is :math:`\left((1-\alpha)\hat{A}X + \alpha X_0\right)
    \left((1-\beta_\ell)I + \beta_\ell W\right)` with :math:`\beta_\ell = \log(\theta/\ell + 1)`,
    1 without a theta. Shapes are those of :class:`Stack`.
    """

    def __init__(self, recipe: Recipe, i: int, o: int, normalize: bool = False) -> None:
        super().__init__()
        self.residual, theta = recipe.residual, recipe.theta
        self.lin_in, self.lin_out = nn.Linear(i, recipe.hidden), nn.Linear(recipe.hidden, o)
        self.convs = nn.ModuleList(
            # GCN2Conv takes the layer's number with theta only, and both or none.
            GCN2Conv(recipe.hidden, recipe.alpha, theta, theta and number, normalize=normalize)
            for number in range(1, recipe.layers + 1)
        )
        self.norms = _norms([recipe.hidden] * recipe.layers, recipe)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = first = self.dropout(self.relu(self.lin_in(x)))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = norm(conv(x, first, adjacency))
            x = self.dropout(self.relu(out + x if self.residual else out))
        return self.lin_out(x)


def _norms(widths: Sequence[int], recipe: Recipe) -> nn.ModuleList:
    return nn.ModuleList(nn.BatchNorm1d(w) if recipe.batch_norm else nn.Identity() for w in widths)


def gcn(recipe: Recipe, i: int, o: int, normalize: bool = False) -> Stack:
    """Return a GCN; see :func:`build`."""
    hidden = [recipe.hidden] * (recipe.layers - 1)
    convs = [GCNConv(a, b, normalize=normalize) for a, b in pairwise([i, *hidden, o])]
    return Stack(convs, hidden, recipe)


def attention(recipe: Recipe, i: int, o: int, conv: Callable[..., nn.Module] = GATConv) -> Stack:
    """Return a GAT, or a network of another attention layer with the same arguments.

    Heads are concatenated in hidden layers and averaged in the last one.
    """
    heads, rate = recipe.heads, recipe.attention_dropout
    widths = [heads * recipe.hidden] * (recipe.layers - 1)
    convs = [conv(a, recipe.hidden, heads, dropout=rate) for a in [i, *widths][:-1]]
    last = conv([i, *widths][-1], o, heads, concat=False, dropout=rate)
    return Stack([*convs, last], widths, recipe)


def build(model: str, recipe: Recipe, i: int, o: int, *, normalize: bool = False) -> nn.Module:
    """Return a freshly initialized network; its weights come from torch's global generator.

    Args:
        model: ``"gcn"``, ``"gat"`` or ``"gcnii"``.
        recipe: Widths, depths and dropout rates.
        i: Number of features of a node.
        o: Number of classes.
        normalize: Whether a GCN or GCNII takes ``edge_index`` and normalizes it in every layer, as
            by PyG's default; else it takes the normalized adjacency.

    Raises:
        ValueError: If ``model`` is another name.
    """
    if model == "gat":
        return attention(recipe, i, o)
    if model not in ("gcn", "gcnii"):
        raise ValueError(f"Expected model 'gcn', 'gat' or 'gcnii' (got {model!r})")
    return (gcn if model == "gcn" else GCNII)(recipe, i, o, normalize)

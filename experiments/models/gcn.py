"""GCN: Kipf and Welling, `Semi-Supervised Classification with Graph Convolutional Networks
<https://arxiv.org/abs/1609.02907>`_."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch_geometric.nn import GCNConv


class GCN(nn.Module):
    r"""Layers :math:`\hat{A} X W`, each but the last followed by batch norm, ReLU and dropout.

    Args:
        in_channels: Number of features of a node.
        hidden: Width of every layer but the last.
        out_channels: Number of classes.
        layers: Number of convolutions, at least 1.
        dropout: Share of hidden activations zeroed in training.
        batch_norm: Normalise each hidden layer over the nodes.
        normalize: ``False``: forward gets :math:`\hat{A}` itself, normalised once by
            :func:`experiments.helpers.data.prepare`. ``True``: it gets ``edge_index`` and every
            layer normalises it anew, as PyG's default does.

    Shapes:
        - **input**: x [N, in_channels] float32; adjacency, a sparse CSR [N, N] float32, or
          ``edge_index`` [2, E] int64 where ``normalize`` is set
        - **output**: logits [N, out_channels] float32
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        layers: int,
        *,
        dropout: float = 0.5,
        batch_norm: bool = True,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden] * (layers - 1) + [out_channels]
        self.convs = nn.ModuleList(GCNConv(a, b, normalize=normalize) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(width) if batch_norm else nn.Identity() for width in widths[1:-1]
        )
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.dropout(self.relu(norm(conv(x, adjacency))))
        return self.convs[-1](x, adjacency)

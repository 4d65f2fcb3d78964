"""GAT: Velickovic et al., `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch_geometric.nn import GATConv


class GAT(nn.Module):
    r"""Attention layers; heads are concatenated in hidden layers and averaged in the last one.

    Each layer but the last is followed by batch norm, ReLU and dropout.

    Args:
        in_channels: Number of features of a node.
        hidden: Width of *one head*: a hidden layer is ``heads * hidden`` wide.
        out_channels: Number of classes.
        layers: Number of convolutions, at least 1.
        heads: Attention heads of every layer.
        dropout: Share of hidden activations zeroed in training.
        input_dropout: The same for the input features.
        attention_dropout: The same for the attention weights of every layer.
        batch_norm: Normalise each hidden layer over the nodes.
        conv: The attention layer: GATConv, or one with the same arguments.

    Shapes:
        - **input**: x [N, in_channels] float32; edge_index [2, E] int64
        - **output**: logits [N, out_channels] float32
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        layers: int,
        *,
        heads: int = 1,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        batch_norm: bool = True,
        conv: Callable[..., nn.Module] = GATConv,
    ) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(input_dropout)
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        width = in_channels
        for _ in range(layers - 1):
            self.convs.append(conv(width, hidden, heads, dropout=attention_dropout))
            width = heads * hidden
            self.norms.append(nn.BatchNorm1d(width) if batch_norm else nn.Identity())
        self.convs.append(conv(width, out_channels, heads, concat=False, dropout=attention_dropout))
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.input_dropout(x)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.dropout(self.relu(norm(conv(x, edge_index))))
        return self.convs[-1](x, edge_index)

"""GCNII: Chen et al., `Simple and Deep Graph Convolutional Networks
<https://arxiv.org/abs/2007.02133>`_."""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv


class GCNII(nn.Module):
    r"""A linear layer in, ``layers`` convolutions of one width, a linear layer out.

    Convolution :math:`\ell` is :math:`\left((1-\alpha)\hat{A}X + \alpha X_0\right)
    \left((1-\beta_\ell)I + \beta_\ell W\right)` with :math:`\beta_\ell = \log(\theta/\ell + 1)`,
    followed by batch norm, the residual sum where asked for, ReLU and dropout.

    Args:
        in_channels: Number of features of a node.
        hidden: Width of every convolution.
        out_channels: Number of classes.
        layers: Number of convolutions, at least 1.
        alpha: Share of the first representation :math:`X_0`.
        theta: Strength of the weights; ``None`` means :math:`\beta_\ell = 1`.
        dropout: Share of hidden activations zeroed in training.
        residual: Add each convolution's input to its output.
        batch_norm: Normalise each convolution's output over the nodes.
        normalize: ``False``: forward gets :math:`\hat{A}` itself. ``True``: it gets ``edge_index``
            and every convolution normalises it anew, as PyG's default does.

    Shapes:
        - **input**: x [N, in_channels] float32; adjacency, a normalised sparse CSR [N, N] float32,
          or ``edge_index`` [2, E] int64 where ``normalize`` is set
        - **output**: logits [N, out_channels] float32
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        layers: int,
        *,
        alpha: float = 0.1,
        theta: float | None = 0.5,
        dropout: float = 0.5,
        residual: bool = False,
        batch_norm: bool = True,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.residual = residual
        self.lin_in = nn.Linear(in_channels, hidden)
        self.lin_out = nn.Linear(hidden, out_channels)
        self.convs = nn.ModuleList(
            # GCN2Conv takes the layer's number with theta only, and both or none.
            GCN2Conv(hidden, alpha, theta, None if theta is None else number, normalize=normalize)
            for number in range(1, layers + 1)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(hidden) if batch_norm else nn.Identity() for _ in self.convs
        )
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = first = self.dropout(self.relu(self.lin_in(x)))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = norm(conv(x, first, adjacency))
            if self.residual:
                out = out + x
            x = self.dropout(self.relu(out))
        return self.lin_out(x)

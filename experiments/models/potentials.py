"""Interatomic potentials: nets that give an energy, and forces as its negative gradient.

The potentials are PyG's SchNet, DimeNet++ and ViSNet, and a small one in the manner of MACE. PyG's
take their neighbors and triplets from compiled packages; here plain torch finds them, so that the
potentials run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch_geometric.nn.models import DimeNetPlusPlus, SchNet, ViSNet, dimenet, visnet

CUTOFF = 5.0


def molecules(
    count: int, atoms: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return atoms on a jittered grid of spacing 1.4, so that none are too near each other.

    Returns:
        The number, position and molecule of each atom.
    """
    generator = torch.Generator().manual_seed(seed)
    side = next(n for n in range(1, atoms + 1) if n**3 >= atoms)
    grid = torch.cartesian_prod(*3 * [torch.arange(side, dtype=dtype)])[:atoms] * 1.4
    pos = grid.repeat(count, 1)
    pos += 0.2 * torch.randn(pos.shape, generator=generator, dtype=dtype)
    z = torch.randint(1, 9, (count * atoms,), generator=generator)
    return z, pos, torch.arange(count).repeat_interleave(atoms)


def neighbors(pos: Tensor, r: float, batch: Tensor, loop: bool = False, **_: Any) -> Tensor:
    """Return all pairs in a molecule that are near each other, in place of ``radius_graph``."""
    pairs = []
    start = 0
    for size in torch.bincount(batch).tolist():
        near = torch.cdist(pos[start : start + size].detach(), pos[start : start + size].detach())
        near = near <= r
        if not loop:
            near.fill_diagonal_(False)
        pairs.append(near.nonzero().t() + start)
        start += size
    return torch.cat(pairs, 1)


def triplets(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Return edges k->j and j->i, with k other than i, in place of PyG's function of this name."""
    row, col = edge_index
    order = col.argsort(stable=True)
    count = torch.bincount(col, minlength=num_nodes)
    first = count.cumsum(0) - count
    into = count[row]  # edges that end where this one begins
    idx_ji = torch.arange(len(row)).repeat_interleave(into)
    place = torch.arange(len(idx_ji)) - (into.cumsum(0) - into).repeat_interleave(into)
    idx_kj = order[first[row[idx_ji]] + place]
    idx_i, idx_j, idx_k = col[idx_ji], row[idx_ji], row[idx_kj]
    mask = idx_i != idx_k
    return col, row, idx_i[mask], idx_j[mask], idx_k[mask], idx_kj[mask], idx_ji[mask]


@contextmanager
def plain_neighbors() -> Iterator[None]:
    """Let PyG's nets find neighbors and triplets with plain torch."""
    with (
        mock.patch.object(visnet, "radius_graph", neighbors),
        mock.patch.object(dimenet, "radius_graph", neighbors),
        mock.patch.object(dimenet, "triplets", triplets),
    ):
        yield


class Mace(nn.Module):
    """A small net in the manner of MACE: many-body products of sums over neighbors.

    Scalars and vectors stand for its irreducible representations: the density of a neighborhood
    is projected on both, and invariants of up to three of them make the next scalars.
    """

    def __init__(self, channels: int = 64, layers: int = 2, radial: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, channels)
        self.register_buffer("waves", torch.arange(1, radial + 1) * torch.pi / CUTOFF)
        self.radial = nn.ModuleList(
            nn.Sequential(nn.Linear(radial, 64), nn.SiLU(), nn.Linear(64, 2 * channels))
            for _ in range(layers)
        )
        self.mix = nn.ModuleList(nn.Linear(channels, channels) for _ in range(layers))
        self.product = nn.ModuleList(nn.Linear(4 * channels, channels) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(channels, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        """Return the energy of each molecule [molecules, 1]."""
        source, target = neighbors(pos, CUTOFF, batch)
        vector = pos[source] - pos[target]
        distance = vector.norm(dim=-1, keepdim=True)
        smooth = 0.5 * (torch.cos(distance * torch.pi / CUTOFF) + 1.0)
        waves = torch.sin(distance * self.waves) / distance * smooth
        h = self.embedding(z)
        direction = (vector / distance).unsqueeze(-1)
        for radial, mix, product in zip(self.radial, self.mix, self.product, strict=True):
            scalar, other = (mix(h)[source].repeat(1, 2) * radial(waves)).chunk(2, -1)
            a = torch.zeros_like(h).index_add(0, target, scalar)
            vectors = h.new_zeros(len(h), 3, h.size(1))
            v = vectors.index_add(0, target, direction * other.unsqueeze(1))
            two = (v * v).sum(1)
            h = h + product(torch.cat([a, a * a, two, a * two], -1) / 10)
        energy = self.readout(h)
        return energy.new_zeros(int(batch[-1]) + 1, 1).index_add(0, batch, energy)


class Potential(nn.Module):
    """Energies and forces, computed inside forward as in potentials for molecular dynamics.

    Args:
        net: Returns the energy of each molecule.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energies [molecules, 1] and the forces [atoms, 3]."""
        pos = pos.detach().requires_grad_()
        energy = self.net(z, pos, batch)
        [gradient] = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -gradient


def _schnet(size: int) -> nn.Module:
    def graph(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        edges = neighbors(pos, CUTOFF, batch)
        return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)

    return SchNet(size, size, 2, num_gaussians=20, cutoff=CUTOFF, interaction_graph=graph)


def _dimenet(size: int) -> nn.Module:
    sizes = {"num_blocks": 2, "int_emb_size": 32, "basis_emb_size": 8, "out_emb_channels": size}
    sizes |= {"num_spherical": 4, "num_radial": 4}
    start = "glorot_orthogonal"
    return DimeNetPlusPlus(size, 1, **sizes, cutoff=CUTOFF, output_initializer=start)


def _visnet(size: int) -> nn.Module:
    sizes = {"hidden_channels": size, "num_layers": 2, "num_heads": 4, "num_rbf": 16}
    return ViSNet(derivative=True, **sizes, cutoff=CUTOFF)


POTENTIALS: dict[str, Callable[[int], nn.Module]] = {
    "schnet": lambda size: Potential(_schnet(size)),
    "dimenet++": lambda size: Potential(_dimenet(size)),
    "visnet": _visnet,  # takes its derivative itself
    "mace": lambda size: Potential(Mace(size)),
}
"""Potentials by name, made from their number of channels."""

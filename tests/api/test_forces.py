"""Forwards that differentiate themselves, and gradients that are differentiated: exact values."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator

import pytest
import torch
from beside import small_storages_count
from grids import grid
from old_pyg import needs_dimenet
from samples import Lambda
from torch import Tensor, nn
from torch_geometric.nn import GAT

import gact_graph
from experiments.forces import physics
from experiments.models.potentials import POTENTIALS, molecules, plain_neighbors

LEVELS = {
    "L1, 2 bits": {"bits": 2, "blocks": False},
    "L1, 4 bits": {"bits": 4},
    "L1, 8 bits": {"bits": 8, "blocks": False},
    "L2": {"level": "L2", "bits": 4},
    "CB2, no blocks": {"level": "CB2", "bits": 4, "blocks": False},
    "CB2": {"level": "CB2", "bits": 4},
    "in blocks": {"bits": 4, "blocks": 40},
    "lossless": {"level": "lossless"},
}


@pytest.fixture(autouse=True)
def encode_all() -> Iterator[None]:
    with small_storages_count(), plain_neighbors():
        yield


@functools.cache  # DimeNet++ derives its bases with sympy
def made(name: str) -> nn.Module:
    if name == "dimenet++":
        needs_dimenet()
    torch.manual_seed(1)
    dtype = torch.float32 if name == "visnet" else torch.float64  # ViSNet has no other
    return POTENTIALS[name](16).to(dtype).train()


def potential(name: str) -> nn.Module:
    return copy.deepcopy(made(name))


def wrapped(model: nn.Module, **options) -> nn.Module:
    return gact_graph.wrap(model, min_bytes=0, **{"adaptive": False} | options)


def steps(model: nn.Module, count: int = 2) -> list[Tensor]:
    """Energies and forces, on molecules that are others at each step."""
    results = []
    for step in range(count):
        z, pos, batch = molecules(2, 9, step, next(model.parameters()).dtype)
        energy, forces = model(z, pos, batch)
        results += [energy.detach(), forces.detach()]
        (energy.square().sum() + forces.square().sum()).backward()
    return results


@pytest.mark.parametrize(("name", "level"), grid(POTENTIALS, LEVELS))
def test_energies_and_forces_of_forward_are_those_of_stock(name: str, level: str) -> None:
    options = LEVELS[level]
    stock, got = steps(potential(name)), steps(wrapped(potential(name), **options))
    as_pyg = level == "lossless" or options.get("blocks") is False
    for result, expected in zip(got, stock, strict=True):
        if as_pyg and level != "CB2, no blocks":
            assert torch.equal(result, expected)
        else:  # sums in another order
            order = 1e-12 if result.dtype == torch.float64 else 1e-5
            assert (result - expected).norm() <= order * expected.norm()


@pytest.mark.parametrize(("name", "level"), grid(["schnet", "dimenet++", "mace"], LEVELS))
def test_forces_in_the_loop_are_those_of_stock(name: str, level: str) -> None:
    def forces(model: nn.Module) -> list[Tensor]:
        results = []
        for step in range(2):
            z, pos, batch = molecules(2, 9, step, torch.float64)
            energy = model(z, pos.requires_grad_(), batch)
            results += torch.autograd.grad(energy.sum(), pos, create_graph=True)
            results[-1].square().sum().backward()
        return results

    stock = forces(potential(name).net)
    got = forces(wrapped(potential(name).net, **LEVELS[level]))
    for result, expected in zip(got, stock, strict=True):
        assert (result - expected).norm() <= 1e-12 * expected.norm()


@pytest.fixture
def double() -> Iterator[None]:
    """Makes float64 the default, which ViSNet takes for tensors that it makes itself."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.long
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["schnet", "visnet", "mace"])
@pytest.mark.parametrize("level", ["stock", *LEVELS])
def test_forces_obey_physics(name: str, level: str) -> None:
    """They are the slope of the energy and have no curl, and a simulation keeps its energy."""
    model = potential(name).double()
    if level != "stock":
        wrapped(model, **LEVELS[level])
        steps(model)  # from here on, slots that nobody reads exactly are compressed
    errors = physics(model, atoms=4, steps=15)
    # Truncation and rounding of the differences are both near 1e-10, over a force of order 1e-2.
    assert errors["difference_error"] <= 1e-6
    assert errors["curl"] <= 1e-6
    # Verlet's own error at this step, of the order dt^2.
    assert errors["drift"] <= 1e-3


class TestSurprises:
    """Exact reads where no leaf requires a gradient."""

    def net(self) -> nn.Module:
        """Takes a gradient by a parameter inside forward, and some random numbers."""

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            h = torch.tanh(module.norm(x) @ module.weight)
            inner = (h * torch.rand_like(h)).square().sum()
            [step] = torch.autograd.grad(inner, module.weight, create_graph=True)
            return torch.tanh(x @ (module.weight - 0.1 * step))

        torch.manual_seed(0)
        model = Lambda(forward)
        model.norm = nn.BatchNorm1d(len(model.weight))
        return model

    def run(self, model: nn.Module, count: int = 3) -> list[Tensor]:
        torch.manual_seed(2)
        outputs = []
        for step in range(count):
            x = torch.randn(64, len(model.weight), generator=torch.Generator().manual_seed(step))
            out = model(x)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *(b.clone() for b in model.buffers()), torch.get_rng_state()]

    def test_by_a_parameter_inside_compress(self) -> None:
        """What ran before in the loop cannot run once more, but the next step finds all slots."""
        model = wrapped(self.net(), bits=2)
        x = torch.randn(64, len(model.weight))
        with (
            pytest.raises(RuntimeError, match="differentiates only its own results"),
            gact_graph.compress(model),
        ):
            model(x)
        assert gact_graph.report(model).empty
        for _ in range(2):
            with gact_graph.compress(model):
                out = model(x)
            out.square().sum().backward()
        assert any(row.bits is not None for row in gact_graph.report(model).contexts)

    def test_by_a_parameter_of_an_earlier_call(self) -> None:
        def forward(module: nn.Module, x: Tensor, earlier: Tensor | None = None) -> Tensor:
            weight = module.weight
            if earlier is not None:
                total = earlier.square().sum()
                [gradient] = torch.autograd.grad(total, module.weight, create_graph=True)
                weight = weight - 0.1 * gradient
            return torch.tanh(torch.sigmoid(x @ weight)).cos()

        model = wrapped(Lambda(forward), bits=2, adaptive=True)
        x = torch.randn(64, len(model.weight))
        with (
            pytest.warns(RuntimeWarning, match="ran once more, without compression"),
            pytest.raises(RuntimeError, match="differentiates only its own results"),
        ):
            model(x, model(x))
        for _ in range(2):
            model(x, model(x)).square().sum().backward()
        assert gact_graph.report(model).measurements > 0

    def test_by_a_parameter(self) -> None:
        model = wrapped(self.net(), bits=2)
        with pytest.warns(RuntimeWarning, match="ran once more, without compression") as caught:
            got = self.run(model)
        assert len(caught) == 1
        assert all(map(torch.equal, got, self.run(self.net())))

    @pytest.mark.filterwarnings("ignore:.*ran once more:RuntimeWarning")
    def test_a_forward_that_runs_again_is_not_measured(self) -> None:
        model = wrapped(self.net(), bits=2, adaptive=True)
        self.run(model, count=1)
        assert gact_graph.report(model).measurements == 0
        self.run(model, count=1)
        report = gact_graph.report(model)
        assert report.measurements == 1
        assert report.gradient_error is not None and report.gradient_error > 0

    def test_gradients_of_a_backward_inside(self) -> None:
        """A backward that forward itself runs adds to each gradient once."""

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            torch.sin(torch.sin(x @ module.weight) @ module.weight.t()).sum().backward()
            return module.weight.grad.sum() * x.sum() + (x @ module.weight).sum()

        def run(model: nn.Module) -> list[Tensor]:
            model.weight.grad = torch.ones_like(model.weight)
            x = torch.randn(64, len(model.weight), generator=torch.Generator().manual_seed(1))
            return [model(x).detach(), model.weight.grad.clone()]

        torch.manual_seed(0)
        stock = Lambda(forward)
        model = wrapped(copy.deepcopy(stock), bits=2)
        with pytest.warns(RuntimeWarning, match="ran once more"):
            got = run(model)
        assert all(map(torch.equal, got, run(stock)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(run(model)[0], run(stock)[0])

    def test_buffers_that_forward_assigns(self) -> None:
        def forward(module: nn.Module, x: Tensor) -> Tensor:
            hidden = x @ module.weight
            module.count = module.count + 1
            module.mean = 0.5 * module.mean + 0.5 * hidden.detach().mean()
            [gradient] = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
            return gradient * module.mean

        torch.manual_seed(0)
        stock = Lambda(forward)
        for name in ("count", "mean"):
            stock.register_buffer(name, torch.zeros(()))
        model = wrapped(copy.deepcopy(stock), bits=2)
        x = torch.randn(64, len(model.weight))
        with pytest.warns(RuntimeWarning, match="ran once more"):
            got = model(x)
        assert torch.equal(got, stock(x))
        assert int(model.count) == 1 and torch.equal(model.mean, stock.mean)

    def test_an_input_that_forward_changes_raises(self) -> None:
        """Forward would run once more on the changed values, and return others than stock."""

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            hidden = x @ module.weight
            x.mul_(2.0)
            return torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)[0]

        model = wrapped(Lambda(forward), bits=2, adaptive=True)
        with pytest.raises(RuntimeError, match="to leave its inputs as they were"):
            model(torch.randn(64, len(model.weight)))

    def test_create_graph_in_the_loop(self) -> None:
        """Noisy in the first step, with a warning, and exact from the next one on."""

        def gradient(model: nn.Module) -> Tensor:
            x = torch.randn(64, len(model.weight), generator=torch.Generator().manual_seed(1))
            loss = model(x).square().sum()
            return torch.autograd.grad(loss, model.weight, create_graph=True)[0]

        torch.manual_seed(0)
        stock = Lambda(lambda module, x: torch.tanh(x @ module.weight) @ module.weight.t())
        model = wrapped(copy.deepcopy(stock), bits=2)
        with pytest.warns(RuntimeWarning, match="create_graph=True read tensors") as caught:
            first, *later = [gradient(model) for _ in range(3)]
        assert len(caught) == 1
        assert not torch.equal(first, gradient(stock))
        assert all(torch.equal(gradients, gradient(stock)) for gradients in later)

    def test_a_gradient_that_nobody_differentiates_is_compressed(self) -> None:
        """Saliency, adversarial training: exact in the first step alone."""
        torch.manual_seed(0)
        model = wrapped(Lambda(lambda module, x: torch.tanh(x @ module.weight) + 0), bits=4)
        codecs = []
        for _ in range(2):
            x = torch.randn(64, len(model.weight)).requires_grad_()
            model(x).square().sum().backward()
            codecs.append({row.codec for row in gact_graph.report(model).contexts})
        assert "quantize" not in codecs[0]
        assert "quantize" in codecs[1]

    def test_knowledge_of_forces_is_resumed(self) -> None:
        first = wrapped(potential("schnet"), bits=2)
        steps(first)
        second = wrapped(potential("schnet"), bits=2)
        gact_graph.load_state_dict(second, gact_graph.state_dict(first))
        second.load_state_dict(first.state_dict())
        assert all(map(torch.equal, steps(second), steps(potential("schnet"))))
        # And from its first step on it compresses what nobody reads exactly.
        rows = gact_graph.report(second).contexts
        assert {r.slot: r.codec for r in rows} == {
            r.slot: r.codec for r in gact_graph.report(first).contexts
        }

    def test_inside_compress(self) -> None:
        stock, model = potential("schnet"), wrapped(potential("schnet"), bits=2)
        for step in range(2):
            atoms = molecules(2, 9, step, torch.float64)
            with gact_graph.compress(model):
                energy, forces = model(*atoms)
            expected = stock(*atoms)
            assert torch.equal(energy, expected[0])
            assert torch.equal(forces, expected[1])
            forces.square().sum().backward()


def test_gradients_stay_exact_where_a_tensor_is_gathered_from_the_second_step_on() -> None:
    """At first, ``min_bytes`` leaves the divisor of attention in memory, with its own slot."""
    nodes = 4000
    x, edge_index = torch.randn(nodes, 32), torch.randint(nodes, (2, 4 * nodes))

    def gradient(model: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        energy = model(leaf, edge_index).square().mean()
        [found] = torch.autograd.grad(energy, leaf, create_graph=True)
        (energy + found.square().sum()).backward()
        return found.detach()

    stock = GAT(32, 64, num_layers=2, out_channels=7, act="tanh")
    expected = gradient(stock)
    model = gact_graph.wrap(copy.deepcopy(stock), min_bytes=4 << 20)
    for _ in range(3):
        assert torch.equal(gradient(model), expected)

"""The peers: each scheme against its paper's formula, and the table of all ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments_samples import small_graph
from torch import Tensor, nn

import gact_graph
from experiments import peers
from experiments.helpers import comparison
from experiments.helpers.data import prepare
from experiments.helpers.meters import saved_bytes
from experiments.helpers.peers.codecs import EightBits, RunningRange, WithoutGraphs
from experiments.helpers.peers.exact import SHARE, Exact, pack_rows, projection, unpack_rows
from experiments.helpers.runner import measure, run
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.subjects import ON_EDGES, SUBJECTS
from experiments.helpers.train import seed_everything
from gact_graph.codecs import Drop, register, registered, unregister
from gact_graph.ops.bitmask import pack_bits

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def _codecs() -> Iterator[None]:
    """Takes away what a test registers."""
    before = registered()
    yield
    for codec in registered():
        if codec not in before:
            unregister(codec)


class TestRows:
    def test_codes_are_those_of_the_formula(self) -> None:
        """floor((h - Z) / r * B + u) with B = 3, here with Z and r / B as they are stored."""
        x = torch.randn(50, 13, generator=generator())
        packed, lows, steps = pack_rows(x, generator(7))
        noise = torch.rand(x.shape, generator=generator(7)).double()
        low, step = lows.double(), steps.double()
        codes = torch.floor((x.double() - low) / step + noise)
        assert codes.min() == 0 and codes.max() == 3
        expected = codes * step + low
        # float32 may fall on the other side of a whole number once in a while.
        differing = (unpack_rows(packed, lows, steps, 13).double() - expected).abs() > 1e-4
        assert differing.double().mean() < 0.005
        assert packed.nbytes == 50 * 4 and lows.dtype == steps.dtype == torch.bfloat16

    def test_are_right_on_average(self) -> None:
        x = torch.randn(6, 9, generator=generator())
        packed = pack_rows(x.repeat(3000, 1), generator())
        draws = unpack_rows(*packed, 9).view(3000, 6, 9)
        step = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / 3
        # The variance is at most step^2 / 4; five standard errors of 3,000 draws.
        assert ((draws.mean(0) - x).abs() <= 5 * 0.51 * step / 3000**0.5 + 1e-6).all()
        assert (draws - x).abs().le(step * 1.02).all()

    def test_a_constant_row_is_exact(self) -> None:
        x = torch.tensor([[2.0] * 5, [0.0] * 5, [-0.5] * 5])
        assert torch.equal(unpack_rows(*pack_rows(x, generator()), 5), x)


class TestProjection:
    def test_entries_and_mean(self) -> None:
        """Plus and minus one over the root of the width, so that E[R R^T] = I."""
        draws = [projection(20, SHARE, generator(seed), CPU) for seed in range(1000)]
        assert draws[0].shape == (20, 3)
        assert torch.allclose(draws[0].abs(), torch.full((20, 3), 3**-0.5))
        mean = torch.stack([matrix @ matrix.T for matrix in draws]).mean(0)
        assert (mean - torch.eye(20)).abs().max() < 5 / (3 * 1000) ** 0.5


class TestExact:
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_all_but_linear_layers_and_norms_have_stock_s_gradients(self) -> None:
        x = torch.randn(40, 6, generator=generator(), requires_grad=True)
        dense = torch.eye(40) + torch.eye(40).roll(1, 0)
        matrix = dense.to_sparse_csr()

        def network() -> Tensor:
            torch.manual_seed(1)
            hidden = F.dropout(F.relu(torch.sparse.mm(matrix, x)), 0.3)
            return F.leaky_relu(hidden - 0.2, 0.1)

        grads = []
        for mode in (None, Exact(CPU)):
            if mode is None:
                output = network()
            else:
                with mode:
                    output = network()
            (grad,) = torch.autograd.grad(output.square().sum(), x)
            grads.append((output, grad))
        torch.testing.assert_close(grads[0][0], grads[1][0])
        torch.testing.assert_close(grads[0][1], grads[1][1])

    @pytest.mark.parametrize("block", [1, 16])
    def test_the_gradient_of_a_linear_layer_is_right_on_average(self, block: int) -> None:
        layer = nn.Linear(16, 4)
        x = torch.randn(30, 16, generator=generator(), requires_grad=True)
        layer(x).square().sum().backward()
        exact = layer.weight.grad.clone()
        of_x = x.grad.clone()
        draws = []
        for seed in range(200):
            layer.zero_grad()
            x.grad = None
            with Exact(CPU, block, seed):
                output = layer(x)
            output.square().sum().backward()
            torch.testing.assert_close(x.grad, of_x)
            draws.append(layer.weight.grad.clone())
        stacked = torch.stack(draws)
        error = stacked.std(0) / 200**0.5
        assert ((stacked.mean(0) - exact).abs() <= 5 * error).all()

    def test_batch_norm_reads_its_input_in_two_bits(self) -> None:
        """Stock's formula on the values that were kept."""
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8)
        x = torch.randn(50, 8, requires_grad=True)
        grad = torch.randn(50, 8)
        with Exact(CPU, seed=3):
            norm(x).backward(grad)
        kept = unpack_rows(*pack_rows(x.detach(), generator(3)), 8)
        centred = (kept - x.detach().mean(0)) / (x.detach().var(0, correction=0) + norm.eps).sqrt()
        torch.testing.assert_close(norm.weight.grad, (grad * centred).sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(norm.bias.grad, grad.sum(0))

    @pytest.mark.parametrize(("block", "ranges"), [(1, 30), (16, 2), (64, 1)])
    def test_rows_of_a_block_share_a_range(self, block: int, ranges: int) -> None:
        x = torch.randn(30, 24, generator=generator())
        tensors, restore = Exact(CPU, block).keep(x)
        assert tensors[1].numel() == ranges
        assert restore(*tensors).shape == x.shape
        assert (restore(*tensors) - x).abs().max() <= (x.max() - x.min()) / 3 * 1.02
        narrow, _ = Exact(CPU, block).project(x)
        assert narrow[3].shape == (24, 3)

    def test_a_gcn_takes_what_the_paper_counts(self) -> None:
        """For each layer 2 bits of an eighth, for each norm 2 bits, one bit a mask."""
        task = prepare(small_graph(), "csr")
        seed_everything(0)
        model = SUBJECTS["gcn"].make(3, 3, hidden=64)
        mode = Exact(CPU)

        def forward() -> Tensor:
            with mode:
                output: Tensor = model(task.x, task.adjacency)
            return output

        counted = saved_bytes(forward, model, [task.x, *_parts(task.adjacency)]) + mode.nbytes
        nodes, stats = 60, 4  # bytes of a row's minimum and step
        linear = [nodes * (1 + stats) + 3 * 4] + 2 * [nodes * (2 + stats) + 64 * 8 * 4]
        norm = nodes * (16 + stats) + 2 * 64 * 4
        masks = 4 * pack_bits(torch.zeros(nodes * 64, dtype=torch.bool)).nbytes
        assert counted == sum(linear) + 2 * norm + masks


def _parts(matrix: Tensor) -> list[Tensor]:
    return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]


class TestMesa:
    def test_codes_are_those_of_the_formula(self) -> None:
        """Clipped to 8 bits, right on average inside the range."""
        x = torch.tensor([-1.0, 0.0, 0.1234, 1.0, 3.0])
        low, width = torch.tensor(0.0), torch.tensor(1.0)
        coded = [EightBits(x, low, width, generator(seed)) for seed in range(2000)]
        draws = torch.stack([each.codes.float() for each in coded])
        torch.testing.assert_close(draws.mean(0)[2], torch.tensor(255 * 0.1234), atol=0.06, rtol=0)
        assert draws[:, 0].eq(0).all() and draws[:, 3].eq(255).all() and draws[:, 4].eq(255).all()
        coded[0].codes = torch.tensor([0, 51, 255], dtype=torch.uint8)
        torch.testing.assert_close(coded[0].decode(), torch.tensor([0.0, 0.2, 1.0]))

    def test_the_range_follows_by_a_tenth(self) -> None:
        codec = RunningRange()
        assert [v.item() for v in codec._range("a", torch.tensor([1.0, 5.0]))] == [1.0, 4.0]
        low, width = codec._range("a", torch.tensor([2.0, 4.0]))
        assert (low.item(), width.item()) == pytest.approx((0.9 + 0.2, 3.6 + 0.2))
        assert [v.item() for v in codec._range("b", torch.tensor([0.0, 1.0]))] == [0.0, 1.0]


@pytest.mark.usefixtures("_codecs")
@pytest.mark.parametrize(
    ("make", "bits", "codec", "factor"),
    [(WithoutGraphs, 4, "quantize", 32 / 4.125), (RunningRange, 8, "8 bits", 4.0)],
)
def test_without_graphs_messages_are_kept_as_messages(
    make: Callable[[], Any], bits: int, codec: str, factor: float
) -> None:
    register(make(), before=Drop)
    task = prepare(small_graph(), "edge_index")
    model = SUBJECTS["gat"].make(3, 3)
    gact_graph.wrap(model, bits=bits, adaptive=False, blocks=False, min_bytes=0)
    model(task.x, task.adjacency).sum().backward()
    rows = {row.slot: row for row in gact_graph.report(model).contexts}
    messages = rows["convs.0/message/mul.other"]
    assert messages.codec == codec
    assert messages.raw_bytes / messages.stored_bytes == pytest.approx(factor, rel=0.02)


class TestCounting:
    def test_each_storage_counts_once_and_parameters_not_at_all(self) -> None:
        layer = nn.Linear(10, 20)
        x = torch.randn(5, 10)

        def forward() -> Tensor:
            hidden = layer(x * 2)  # the product is saved, x is not
            return torch.sigmoid(hidden) * torch.sigmoid(hidden)

        # Both sigmoids are saved twice each: by themselves and by their product.
        assert saved_bytes(forward, layer, [x]) == 4 * (5 * 10 + 2 * 5 * 20)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "small.npz"
    random = np.random.default_rng(0)
    np.savez(
        path,
        edge_index=random.integers(0, 200, (2, 1500)),
        x=random.random((200, 16), dtype=np.float32),
        y=np.arange(200) % 3,
    )
    return str(path)


@pytest.mark.usefixtures("_codecs")
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_all_ways_begin_with_one_loss(model: str, dataset: str) -> None:
    """Those that run here without a compiler, one after another in this process."""
    names = (
        "stock",
        "checkpoint",
        "bf16",
        "exact",
        "lossless+blocks",
        "L1-2+blocks",
        "CB2",
    )
    found = {
        name: measure(
            Case(ON_EDGES[model], name, dataset, steps=2, adaptive=True, hidden=32, layers=2)
        )
        for name in (*names, "gact")
    }
    assert comparison.strangers(found) == []
    saved = {name: row["saved_bytes"] for name, row in found.items()}
    assert 0 < saved["exact"] < saved["stock"] and 0 < saved["gact"] < saved["stock"]
    if model == "gat":
        assert saved["L1-2+blocks"] < saved["gact"]


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2", "transformer", "sage", "pna", "gcnii"])
def test_dgl_begins_with_stock_s_loss(model: str, dataset: str) -> None:
    if STRATEGIES["dgl"].missing(CPU) is not None:
        pytest.skip("no DGL")
    stock, dgl = (
        run(Case(ON_EDGES[model], name, dataset, steps=3, hidden=8, layers=2))
        for name in ("stock", "dgl")
    )
    assert dgl["first_loss"] == pytest.approx(stock["first_loss"], abs=1e-4)
    assert dgl["loss"] == pytest.approx(stock["loss"], abs=1e-3)


def row(saved: int, peak: int, step: float, loss: float = 1.0) -> dict[str, Any]:
    return {
        **{"saved_bytes": saved, "peak_bytes": peak, "step_seconds": step},
        **{"step_process_seconds": step, "compile_seconds": None},
        **{"first_loss": loss, "loss": loss},
    }


class TestComparison:
    found: ClassVar = {
        "stock": row(100_000_000, 200_000_000, 2.0),
        "exact": row(5_000_000, 190_000_000, 3.0),
        "save_on_cpu": row(0, 250_000_000, 9.0),
        "bf16": row(50_000_000, 180_000_000, 2.5, loss=1.1),
        "compiled": {"reason": "needs a C++ compiler"},
        "L1-2+blocks": row(10_000_000, 20_000_000, 1.0),
    }

    def test_a_peer_that_wins_is_told_and_by_how_much(self) -> None:
        assert comparison.remarks(self.found)[:3] == [
            "Least saved for backward: a peer, EXACT, 1/8 and 2 bit, jemalloc, 2.00 times less "
            "than `L1` 2 bit, blocks.",
            "Least peak memory: gact_graph, `L1` 2 bit, blocks, 9.00 times less than "
            "bfloat16 autocast, jemalloc.",
            "Least time of a step: gact_graph, `L1` 2 bit, blocks, 2.00 times less than stock PyG.",
        ]

    def test_rows_and_ratios(self) -> None:
        table = {cells[0]: cells for cells in comparison.peers(self.found).rows}
        assert not any(label.startswith("torch.compile") for label in table)
        assert comparison.remarks(self.found)[3:] == [
            "Not run: torch.compile, jemalloc (needs a C++ compiler)."
        ]
        assert table["`L1` 2 bit, blocks"][1:] == (
            *("10", "0.10x", "2.00x", "20", "0.10x", "0.11x", "1.00", "0.50x", "0.50x", "1.000"),
        )
        assert {len(cells) for cells in table.values()} == {len(comparison.peers(self.found).head)}

    def test_a_column_without_any_entry_is_left_out(self) -> None:
        one = comparison.medians([row(10, 10, seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 9.0)])
        heads = comparison.peers({"dgl": one}).head
        assert "quartiles" in heads and "of best peer's" in heads and "of stock's" not in heads
        assert comparison.peers({"dgl": one}).rows[0][heads.index("quartiles")] == "2.00 to 4.00"
        assert "quartiles" not in comparison.peers(self.found).head

    def test_a_first_step_that_was_no_longer_took_no_time_to_compile(self) -> None:
        found = {"stock": row(1, 1, 2.0), "compiled": row(1, 1, 2.0) | {"compile_seconds": -3.0}}
        assert comparison.peers(found).rows[1][0] == "torch.compile, jemalloc, compiled in 0 s"

    def test_medians_leave_rounds_out_that_gave_nothing(self) -> None:
        rounds = [row(1, 5, 1.0), {"reason": "out of memory"}, row(1, 9, 2.0), row(1, 6, 9.0)]
        assert comparison.medians(rounds)["peak_bytes"] == 6
        assert comparison.medians(rounds)["rounds"] == 3
        assert comparison.medians(rounds)["step_seconds_quartiles"] == [1.5, 5.5]
        assert "step_seconds_quartiles" not in comparison.medians(rounds[:3])
        assert comparison.medians(rounds[1:2]) == {"reason": "out of memory"}

    def test_another_first_loss_is_told(self) -> None:
        found = {**self.found, "exact": row(1, 1, 1.0, loss=1.01)}
        assert comparison.strangers(found) == ["exact"]


def test_rounds_go_over_all_ways_and_are_taken_up_again(
    dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def trial(case: Case) -> dict[str, Any]:
        asked.append(case.strategy)
        if case.strategy == "save_on_cpu":
            return {"reason": "needs CUDA"}
        return row(1_000_000 * len(asked), 2_000_000, 0.5)

    monkeypatch.setattr(comparison, "run", trial)
    flags = ["--model", "gat", "--dataset", dataset, "--variants", "stock,save_on_cpu,CB2"]
    flags += ["--out", str(tmp_path / "out")]
    assert peers.main([*flags, "--rounds", "2"]) == 0
    assert asked == ["stock", "save_on_cpu", "CB2"] * 2
    assert peers.main([*flags, "--rounds", "3"]) == 0
    assert asked == ["stock", "save_on_cpu", "CB2"] * 3
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert found["variants"]["stock"]["saved_bytes"] == 4_000_000
    assert found["variants"]["save_on_cpu"] == {"reason": "needs CUDA"}
    assert "Least peak memory" in capsys.readouterr().out
    assert (
        "Not run: torch's save_on_cpu (needs CUDA)." in (tmp_path / "out" / "peers.md").read_text()
    )
    assert "| stock PyG | 4 | 1.00x |" in (tmp_path / "out" / "peers.md").read_text()
    assert peers.main([*flags, "--steps", "2"]) == 1
    assert "of the same settings (got steps 8 instead of 2)" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_a_way_that_fails_is_a_row_with_the_reason(dataset: str) -> None:
    assert run(Case("gat", "save_on_cpu", dataset)) == {"reason": "needs CUDA"}
    found = run(Case("gat", "stock", "no_such", steps=1))
    assert found["reason"].startswith("failed: ") and "no_such" in found["reason"]

"""The tensors that are alive at the peak of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import memory
from experiments.helpers.meters import Trainee, train
from experiments.helpers.timeline import AtPeak
from gact_graph.codecs import registered

N = 1 << 19  # two mebibytes of float32


class Net(nn.Module):
    """A network whose peak is in ``second``, which the sum of two products ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.Sigmoid()
        self.weight = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x * self.weight).view(-1, 2))
        return y.sum()


def test_tensors_at_the_peak_by_module_and_operation() -> None:
    model, x = Net(), torch.randn(N)
    at_peak = AtPeak(model)
    train(Trainee(model, lambda: model(x)), 2, 0.01, [lambda: at_peak])
    rows = {(row["place"], row["operation"]): row for row in at_peak.rows()}
    # The result of the product was freed after forward, and so were views and the inputs.
    assert rows["first", "aten.relu.default"]["bytes"] == 4 * N
    assert rows["second", "aten.sigmoid.default"] == {
        **{"bytes": 4 * N, "count": 1, "phase": "forward"},
        **{"place": "second", "operation": "aten.sigmoid.default"},
    }
    assert not any("view" in operation or "detach" in operation for _, operation in rows)
    backward = {place for (place, _), row in rows.items() if row["phase"] == "backward"}
    assert backward and all("Backward" in place for place in backward)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "digits", "--model", "gcn", "--variants", "stock,L1", "--steps", "2"]
    assert memory.main([*flags, "--timeline", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Alive at the peak" in shown and "stock PyG" in shown and "aten." in shown


def test_codecs_of_a_peer_are_unregistered(tmp_path: Path) -> None:
    before = registered()
    flags = ["--dataset", "digits", "--model", "gcn", "--variants", "mesa,gact", "--steps", "1"]
    assert memory.main([*flags, "--timeline", "--out", str(tmp_path)]) == 0
    assert registered() == before


def test_a_variant_that_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--variants", "stock,save_on_cpu", "--device", "cpu", "--timeline"]
    assert memory.main([*flags, "--out", str(tmp_path)]) == 2
    expected = "Expected --variants that run here (got save_on_cpu: needs CUDA)"
    assert expected in capsys.readouterr().err

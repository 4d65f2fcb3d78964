"""Potentials at each level: the command, and the checks of forces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.forces import main, physics


@pytest.mark.long
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--models", "mace", "--levels", "lossless,L1-2", "--batch", "8", "--atoms", "12"]
    assert main([*flags, "--steps", "2", "--size", "32", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "forces.json").read_text())["models"]["mace"]
    assert [*found] == ["lossless", "L1-2"]
    for one in found.values():
        assert one["peak_bytes"] >= 0 and one["saved_bytes"] > 0 and one["step_seconds"] > 0
        assert one["energy_error"] == one["forces_error"] == 0
    assert found["lossless"]["gradient_error"] < 1e-6 < found["L1-2"]["gradient_error"]
    assert "`L1` 2 bit" in capsys.readouterr().out


def test_forces_that_are_no_gradient_are_found() -> None:
    def swirl(z: Tensor, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.stack([-pos[:, 1], pos[:, 0], 0 * pos[:, 2]], 1)
        return 0.5 * pos.square().sum(), turned - pos

    found = physics(swirl, atoms=3, steps=50)
    assert found["curl"] > 1 and found["difference_error"] > 0.1
    assert found["drift"] > 0.01


@pytest.mark.parametrize("flags", [["--models", "gcn"], ["--levels", "L3"], ["--steps", "0"]])
def test_flags_that_are_wrong(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--out", str(tmp_path)]) == 2
    assert "Expected" in capsys.readouterr().err

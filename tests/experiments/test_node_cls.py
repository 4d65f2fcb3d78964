"""The main job from its command line: results, mistakes and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments import node_cls
from experiments.helpers.kept import hold_folder
from experiments.node_cls import main


def test_end_to_end_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gat", "--bits", "4", "--seeds", "0-1", "--epochs", "3", "--hidden", "8"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in ("seed 0", "seed 1", "GAT on digits, 4 bit (L1)", "compression rate", "Peak"):
        assert words in text
    content = json.loads((tmp_path / "result.json").read_text())
    assert (content["config"]["adaptive"], content["config"]["bits"]) == (True, 4)
    assert [len(run["loss"]) for run in content["runs"]] == [3, 3]
    assert all(run["stored_bytes"] < run["raw_bytes"] for run in content["runs"])

    assert main([*flags, "--out", str(tmp_path)]) == 0
    assert "2 of 2 seeds are in" in capsys.readouterr().out

    assert main([*flags, "--out", str(tmp_path), "--lr", "0.5"]) == 1
    caught = capsys.readouterr()
    assert "got lr 0.01 instead of 0.5" in caught.err
    assert caught.err.count("\n") == 1


def test_fixed_bits(tmp_path: Path) -> None:
    flags = ["--model", "gcn", "--bits", "4", "--fixed", "--seeds", "0", "--epochs", "3"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["config"]["adaptive"] is False
    assert {c["bits"] for c in content["runs"][0]["contexts"]} <= {4, 16, None}


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gcn", "--compare", "--seeds", "0", "--epochs", "2", "--bits", "4"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "--bits 4 is not used" in text
    assert "not yet" not in text
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| adaptive 2 bit |" in report and "not yet" not in report
    configs = {
        name: json.loads((tmp_path / name / "result.json").read_text())["config"]
        for name in ("fp32", "fixed-4", "adaptive-2")
    }
    found = [(c["bits"], c["level"], c["adaptive"]) for c in configs.values()]
    assert found == [(32, "L0", False), (4, "L1", False), (2, "L1", True)]

    assert main([*flags, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("1 of 1 seeds are in") == 5


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--model gcn --bits 17", 2, "Expected a whole number 1 to 16, or 32"),
        ("--model gcn", 2, "Expected --bits B"),
        ("--model gcn --bits 4 --out=", 2, "Expected a path (got '')"),
        ("--model gcn --bits 4 --out /dev/null", 1, "Expected --out to be a folder"),
        ("--model gcn --bits 4 --hidden 1000000000", 2, "give smaller --hidden, --heads"),
        (
            "--model gat --memory 1MB --seeds 0 --epochs 1",
            3,
            "some strategy fits (got 976.6 KiB",
        ),
        ("--model gat --memory 1MB --bits 4", 2, "Expected --memory in place of --bits"),
        ("--model gat --memory 1", 2, "Expected an amount of memory such as 4GB"),
        ("--model gat --bits 4 --blocks off --heads 1000000", 2, "or --blocks auto"),
        ("--model gcnii --bits 4 --layers 1000000000", 2, "give smaller --hidden, --heads"),
        ("--model gcn --bits 4 --dataset synthetic:cora@1e9", 1, "use a smaller scale"),
        ("--model gcn --bits 4 --seeds 0-4294967295", 2, "Expected at most 10,000 seeds"),
        ("--model gcn --bits 4 --dataset nosuch", 1, "nosuch"),
        ("--model gcn --bits 4 --dataset nosuch.npz", 1, "nosuch.npz"),
    ],
)
def test_mistakes_end_in_one_line(
    line: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    # The progress of an estimate that takes long comes before.
    text = text[text.index("node_cls: ") :]
    assert words in text
    assert text.count("\n") == 1


def test_a_folder_in_use_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "gcn", "--bits", "32", "--epochs", "1", "--seeds", "0"]
    with hold_folder(tmp_path, print):
        assert main([*flags, "--out", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert f"(got process {os.getpid()})" in text
    assert text.count("\n") == 1
    assert main([*flags, "--out", str(tmp_path)]) == 0


def test_interruption_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(job, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(node_cls, "run", interrupted)
    flags = ["--model", "gcn", "--bits", "32", "--out", str(tmp_path)]
    assert main(flags) == 130
    assert f"finished results are in {tmp_path}" in capsys.readouterr().err

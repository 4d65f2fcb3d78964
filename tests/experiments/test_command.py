"""The frame of every command: flags, exit codes, and one line about what went wrong."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from datasets import DatasetError
from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.recipes import recipe_for
from experiments.node_cls import complete, main

FOLDER = Path(command.__file__).parents[1]
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def parse(line: str):
    return complete(main.parse(line.split()))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_flags_with_their_defaults(
    name: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # no breaks of lines
    main = importlib.import_module(f"experiments.{name}").main
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m experiments.{name}" in text
    for flag, options in main._flags:
        default = options.get("default")
        assert flag in text and (default is None or f"(default: {default})" in text), flag


def test_names_count_once_and_must_be_known() -> None:
    assert command.choose("--models", "b,a,b", ("a", "b")) == ["b", "a"]
    with pytest.raises(UsageError, match=r"Expected --models of a, b \(got ''\)"):
        command.choose("--models", "a,", ("a", "b"))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("words"), 2, "words"),
        (DatasetError("words"), 1, "words"),
        (torch.OutOfMemoryError("words"), 1, "the device's memory is full"),
        (MemoryError(), 1, "the device's memory is full"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            1,
            "memory is full",
        ),
        (
            KeyboardInterrupt(),
            130,
            "Interrupted: finished results are in DIR, and the same command",
        ),
    ],
)
def test_errors_end_in_one_line(error: BaseException, code: int, words: str, capsys) -> None:
    def fail() -> None:
        raise error

    assert command.exit_code("tool", fail, lambda: Path("DIR")) == code
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1
    assert command.exit_code("tool", lambda: None) == 0


def test_a_defect_is_shown_in_full() -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        command.exit_code("tool", fail)


def test_interruption_without_a_folder_keeps_nothing(capsys) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert command.exit_code("tool", interrupt) == 130
    assert "nothing is kept without --out" in capsys.readouterr().err


class TestTheMainJob:
    def test_defaults(self) -> None:
        args = parse("--model gat --bits 4")
        assert (args.dataset, args.data_root, args.out) == ("digits", Path("data"), None)
        assert args.recipe == recipe_for("gat", "digits")
        assert args.seeds == tuple(range(10))
        assert (args.level, args.blocks, args.fixed, args.compare) == ("L1", None, False, False)

    def test_flags_override_the_recipe(self) -> None:
        args = parse(
            "--model gat --bits 8 --epochs 7 --hidden 16 --layers 3 --heads 2 --dropout 0 "
            "--lr 0.1 --weight-decay 0 --out DIR --blocks 4096 --level CB2"
        )
        recipe = args.recipe
        assert (recipe.epochs, recipe.hidden, recipe.layers, recipe.heads) == (7, 16, 3, 2)
        assert (recipe.dropout, recipe.lr, recipe.weight_decay) == (0.0, 0.1, 0.0)
        assert (args.out, args.level, args.blocks) == (Path("DIR"), "CB2", 4096)

    def test_level_follows_bits(self) -> None:
        assert parse("--model gcn --bits 32").level == "L0"
        assert parse("--model gcn --bits 32 --level L1").level == "L1"
        assert parse("--model gcn --bits 32 --level lossless").level == "lossless"
        assert parse("--model gcn --compare --bits 32").level == "L1"

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("--bits 4", "--model"),
            ("--model gin --bits 4", "gin"),
            ("--model gcn", r"Expected --bits B, or --compare"),
            (
                "--model gcn --bits 17",
                r"--bits: Expected a whole number 1 to 16, or 32 \(",
            ),
            ("--model gcn --bits 4 --heads 2", r"Expected --heads with --model gat only"),
            (
                "--model gcn --bits 4 --level lossless",
                r"--bits 32 with --level lossless, which quantizes nothing \(got --bits 4\)",
            ),
            ("--model gcn --compare --level L0", r"\(got --compare\)"),
            ("--model gcn --bits 4 --level L9", "L9"),
            ("--model gcn --bits 4 --seeds 9-0", "--seeds: Expected seeds"),
            ("--model gcn --bits 4 --epoch 3", "--epoch"),
            ("--model gcn --bits 4 --out=", r"--out: Expected a path \(got ''\)"),
            ("--model gcn --bits 4 --out \udcff", r"to be UTF-8 text \(got '\\udcff'\)"),
            ("--model gcn --bits 4 --out a\0b", r"to be UTF-8 text \(got 'a\\x00b'\)"),
            ("--model gcn --bits 4 --blocks all", "--blocks: Expected a whole number"),
            ("--model gat --bits 4 --halo-bits 8", r"--halo-bits with --partition \(got 8 alone\)"),
            (
                "--model gat --bits 4 --partition order --sampler cluster",
                r"or --sampler \(got",
            ),
            (
                "--model gat --bits 4 --partition order --level CB2",
                "lossless, L1 or L2 with",
            ),
        ],
    )
    def test_bad_flags_are_told_in_one_line(self, line: str, words: str) -> None:
        with pytest.raises(UsageError, match=words) as caught:
            parse(line)
        assert "\n" not in str(caught.value)

    def test_several_processes_need_a_sampler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match=r"--sampler or --partition under torchrun \(got 2"):
            parse("--model gcn --bits 4")

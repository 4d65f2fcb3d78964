"""200 command lines of the main job: done, or refused in one line, with the documented code."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from experiments_samples import small_graph

from experiments.helpers.job import Job
from experiments.node_cls import main
from experiments.save_graph import save

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LINES, WHOLE = 200, 6

NUMBERS = (
    *("0", "1", "2", "3", "4", "16", "17", "32", "-1", "-0", "+4", "4.0", "1e3", "1_000", "", " "),
    *("nan", "inf", "-inf", "0.5", "1e-320", "1e308", "1e309", "0x10", "4a", "٤", "½", "\u00a04"),
    *("1000000000", "1000000001", "9223372036854775808", "9" * 5000, "auto", "None", "True"),
)
VALUES = {
    "--model": ("gcn", "gat", "gcnii", "GCN", "", "gin"),
    "--bits": NUMBERS,
    "--dataset": (
        *("digits ", "", "nosuch", "nosuch.npz", ".npz", "/", "/dev/null", "x\ny"),
        *("synthetic:", "synthetic:cora", "synthetic:cora@", "synthetic:cora@0", "synthetic:x@1"),
        *("synthetic:cora@1e9", "synthetic:cora@1e308", "synthetic:cora@nan", "synthetic:cora@-1"),
        *("synthetic:cora@1e-9", "synthetic:yelp@1e5", "[red]digits[/red]", "{digits}"),
    ),
    "--level": ("L0", "lossless", "L1", "L2", "CB1", "CB2", "L3", "", "l1"),
    "--blocks": NUMBERS,
    "--seeds": ("0", "0-1", "1,0,1", "-1", "0-", "0-4294967295", "9-0", "0,,1", "4294967296", ""),
    "--epochs": NUMBERS,
    "--hidden": NUMBERS,
    "--layers": NUMBERS,
    "--heads": NUMBERS,
    "--dropout": NUMBERS,
    "--lr": NUMBERS,
    "--weight-decay": NUMBERS,
    "--device": ("cpu", "cuda:99", "meta", "cpu:1", "", "cuda:-1", "mps", "\0"),
    "--data-root": ("", "/dev/null", "data", "\udcff"),
    "--out": ("OUT", "", "/dev/null", "/proc/none", "OUT/" + "n" * 300, "OUT/a\0b", "OUT/\udcff"),
}
BARE = ("--compare", "--fixed", "--nosuch", "digits", "--", "-h=1", "--bits")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A graph of 60 nodes: blocks of one edge are slow on any other."""
    path = tmp_path_factory.mktemp("data") / "small.npz"
    save(small_graph(), path)
    return str(path)


def line_of(seed: int, out: Path, small: str) -> list[str]:
    """Mostly right, with one to three flags that may be anything."""
    rng = random.Random(seed)
    flags = {
        "--model": rng.choice(("gcn", "gat", "gcnii")),
        "--bits": "4",
        "--out": "OUT",
        "--dataset": small,
    }
    flags |= {"--dataset": small, "--epochs": "2", "--seeds": "0", "--hidden": "4", "--layers": "2"}
    for name in rng.sample(list(VALUES), rng.choice((1, 1, 2, 3))):
        flags[name] = rng.choice(VALUES[name])
    line = [part for name, value in flags.items() for part in (name, value)]
    if rng.random() < 0.2:
        line.append(rng.choice(BARE))
    return [part.replace("OUT", str(out)) for part in line]


@pytest.fixture
def no_long_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes is built and trained for two epochs of two seeds, whatever was asked for."""
    import dataclasses

    from experiments import node_cls

    real = node_cls.run

    def brief(job: Job, console):
        recipe = job.setup.recipe
        recipe = dataclasses.replace(recipe, epochs=min(recipe.epochs, 2))
        setup = dataclasses.replace(job.setup, recipe=recipe)
        return real(dataclasses.replace(job, setup=setup, seeds=job.seeds[:2]), console)

    monkeypatch.setattr(node_cls, "run", brief)


def check(line: list[str], code: int, errors: str) -> None:
    assert code in (0, 1, 2), (line, code, errors)
    if code:
        assert errors.startswith("node_cls: "), (line, errors)
        assert errors.count("\n") == 1 and len(errors) < 1000, (line, errors)
    assert "Traceback" not in errors, (line, errors)


def test_lines(
    tmp_path: Path, small: str, no_long_training, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    for seed in range(LINES):
        line = line_of(seed, tmp_path / f"out{seed}", small)
        try:
            code = main(line)
        except BaseException as error:
            raise AssertionError(f"{line} ended in {error!r}") from error
        check(line, code, capsys.readouterr().err)
        codes.append(code)
    assert min(codes.count(code) for code in (0, 1, 2)) >= 5, codes


@pytest.mark.parametrize("seed", range(WHOLE))
def test_lines_in_a_process_of_their_own(tmp_path: Path, small: str, seed: int) -> None:
    line = [part for part in line_of(seed, tmp_path, small) if "\0" not in part]
    command = [sys.executable, "-m", "experiments.node_cls", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=dict(os.environ))
    check(line, done.returncode, done.stderr.decode(errors="replace"))

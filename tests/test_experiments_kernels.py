from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pytest
import torch

from experiments.kernels import main, measure, parse_widths


def test_table_and_file_hold_every_width(tmp_path: Path, capsys) -> None:
    out = tmp_path / "kernels.json"
    flags = ["--elements", "10_000", "--bits", "1-2,8", "--rounds", "3", "--threads", "1"]
    threads = torch.get_num_threads()
    assert main([*flags, "--out", str(out)]) == 0
    assert torch.get_num_threads() == threads
    text = capsys.readouterr().out
    assert "1 threads" in text and "10,000 float32, 3 rounds" in text
    assert "pack / copy" in text and "unpack / clone" in text
    content = json.loads(out.read_text())
    assert (content["elements"], content["bits"], content["threads"]) == (10_000, [1, 2, 8], 1)
    times, median = content["milliseconds"], content["median_milliseconds"]
    names = [f"{job} {bits}" for bits in (1, 2, 8) for job in ("pack", "unpack")]
    assert list(times) == ["copy", "clone", *names]
    assert all(len(found) == 3 and min(found) > 0 for found in times.values())  # no warm-up
    assert median == {name: statistics.median(found) for name, found in times.items()}
    assert content["pack_over_copy"]["2"] == median["pack 2"] / median["copy"]
    assert content["unpack_over_clone"]["8"] == median["unpack 8"] / median["clone"]
    assert f"{content['pack_over_copy']['2']:.2f}" in text


def test_jobs_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("experiments.timing.time.perf_counter", lambda: next(clock) ** 2)
    times = measure(100, (2,), 2)
    # Four jobs a round with two looks at the clock each; look k reads k^2 seconds.
    assert times["copy"] == [1e3 * (2 * k + 1) for k in (8, 16)]
    assert times["unpack 2"] == [1e3 * (2 * k + 1) for k in (14, 22)]


def test_widths_are_read() -> None:
    assert parse_widths("1-8") == tuple(range(1, 9))
    assert parse_widths("2,4,2") == (2, 4)


@pytest.mark.parametrize("text", ["", "0-3", "17", "3-1", "a", "1-", "-1", "1.5"])
def test_widths_that_make_no_sense_are_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="Expected widths"):
        parse_widths(text)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--elements 0", 2, "Expected a whole number of at least 1"),
        ("--bits 0-3", 2, "Expected widths from low to high, 1 to 16 (got '0-3')"),
        ("--elements 9 --bits 1 --out /nowhere/at/all.json", 1, "Expected to be able to write"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from pathlib import Path

import pytest
import torch

from experiments.helpers import kernels_cuda, kernels_edges
from experiments.helpers.kernels_cuda import (
    copy_bytes,
    gigabytes_per_second,
    pack_bytes,
    packed_bytes,
    unpack_bytes,
)
from experiments.helpers.timing import launch_seconds, time_on
from experiments.kernels import main, measure, parse_widths
from gact_graph.ops.quantize import pack

CPU = torch.device("cpu")


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
    monkeypatch.setattr("experiments.helpers.timing.time.perf_counter", lambda: next(clock) ** 2)
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
        ("--elements 0", 2, "Expected a whole number from 1 to 10^9"),
        ("--bits 0-3", 2, "Expected widths from low to high, 1 to 16 (got '0-3')"),
        ("--dtype float16 --bits 1-16", 2, "Expected --bits below the 16 of float16"),
        ("--dtype int8", 2, "invalid choice: 'int8'"),
        ("--device tpu", 2, "Expected --device cpu, cuda or cuda:N (got 'tpu')"),
        ("--elements 9 --bits 1 --out /nowhere/at/all.json", 1, "Expected to be able to write"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1


def test_other_dtypes(tmp_path: Path, capsys) -> None:
    out = tmp_path / "kernels.json"
    flags = ["--elements", "1000", "--bits", "2", "--rounds", "1", "--threads", "1"]
    assert main([*flags, "--dtype", "bfloat16", "--out", str(out)]) == 0
    assert "1,000 bfloat16" in capsys.readouterr().out
    assert json.loads(out.read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("elements", [0, 1, 64, 65, 256, 257, 1000])
@pytest.mark.parametrize(("bits", "group_size"), [(1, 64), (2, 256), (5, 1024), (16, 256)])
def test_bytes_are_those_that_a_record_holds(elements: int, bits: int, group_size: int) -> None:
    record = pack(torch.ones(elements), bits, group_size=group_size)
    assert packed_bytes(elements, bits, group_size) == record.nbytes
    moved = 4 * elements + record.nbytes
    assert pack_bytes(elements, 4, bits, group_size) == moved
    assert unpack_bytes(elements, 4, bits, group_size) == moved


def test_speeds_and_shares_of_the_ceiling() -> None:
    assert copy_bytes(3) == 6
    assert gigabytes_per_second(copy_bytes(10**9), 0.5) == 4000.0
    found = kernels_cuda.summary(
        {"copy": [1.0, 2.0, 9.0], "pack 2": [4.0, 4.0, 4.0]},
        {"copy": 8_000_000, "pack 2": 12_000_000},
    )
    assert found["ceiling_gb_per_s"] == 4.0
    job = found["jobs"]["pack 2"]
    assert (job["gb_per_s"], job["of_ceiling"], job["bytes"]) == (3.0, 0.75, 12_000_000)
    assert job["milliseconds"] == [4.0, 4.0, 4.0] and job["median_milliseconds"] == 4.0


def test_what_runs_on_cuda_runs_on_the_cpu_too() -> None:
    found = kernels_cuda.measure(3000, (1, 8), 2, torch.float16, CPU, copied=5000)
    assert [*found["jobs"]] == ["copy", "pack 1", "unpack 1", "pack 8", "unpack 8"]
    assert found["jobs"]["copy"]["bytes"] == 10_000
    assert found["jobs"]["pack 8"]["bytes"] == pack_bytes(3000, 2, 8, 256)
    assert found["jobs"]["copy"]["of_ceiling"] == 1.0
    assert all(len(job["milliseconds"]) == 2 for job in found["jobs"].values())
    launch = found["launch_microseconds"]
    assert launch.keys() == {"pack", "copy"} and min(launch.values()) > 0
    rows = kernels_cuda.table(found, (1, 8))
    assert [row[0] for row in rows] == ["1", "8"]
    assert all(len(row) == len(kernels_cuda.HEAD) for row in rows)
    assert f"{found['ceiling_gb_per_s']:,.0f} GB/s" in kernels_cuda.notes(found)[0]


def test_launches_are_counted_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at the clock a round of three calls, and the device is asked outside of them."""
    seen: list[str] = []
    clock = iter((0.0, 9.0, 10.0, 16.0, 20.0, 23.0, 30.0, 45.0))

    def look() -> float:
        seen.append("clock")
        return next(clock)

    monkeypatch.setattr("experiments.helpers.timing.time.perf_counter", look)
    monkeypatch.setattr(
        "experiments.helpers.timing.synchronize", lambda device: seen.append("wait")
    )
    assert launch_seconds(CPU, lambda: seen.append("call"), 3, 3) == 2.0  # of 2, 1 and 5
    assert seen == 4 * ["wait", "clock", "call", "call", "call", "clock"] + ["wait"]


def test_events_stand_around_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that is played: it is waited for once a round, with everything queued."""
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("event")
            self.place = len(seen)

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.place - self.place)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("wait"))
    jobs = {"one": lambda: seen.append("one"), "two": lambda: seen.extend(["two", "two"])}
    assert time_on(torch.device("cuda"), jobs, 2) == {"one": [2.0, 2.0], "two": [3.0, 3.0]}
    turn = ["one", "event", "one", "event", "event", "two", "two", "event", "wait"]
    assert seen == 3 * turn


def test_sums_over_edges_stand_beside_plain_torch() -> None:
    found = kernels_edges.measure(50, 2, CPU)
    assert (found["nodes"], found["edges"]) == (50, 800)
    assert len(kernels_edges.table(found)) == len(found["jobs"]) == 5
    gathered = 800 * 192 * 4
    for name, job in found["jobs"].items():
        assert job["median_milliseconds"] > 0 and job["plain_milliseconds"] > 0
        assert (job["bytes"] > gathered) == (name != "GAT's weights")


@pytest.mark.gpu
def test_cuda_reads_the_clock_of_the_device(tmp_path: Path, capsys) -> None:
    device = torch.device("cuda")
    x = torch.ones(1 << 26, device=device)
    times = time_on(device, {"one": x.clone, "ten": lambda: [x.mul_(1) for _ in range(10)]}, 3)
    assert [len(found) for found in times.values()] == [3, 3]
    out = tmp_path / "kernels.json"
    flags = [
        "--device",
        "cuda",
        "--elements",
        "1_000_000",
        "--bits",
        "2,16",
        "--rounds",
        "2",
        "--nodes",
        "1000",
    ]
    assert main([*flags, "--out", str(out)]) == 0
    assert "of copy" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["jobs"]["pack 16"]["gb_per_s"] > 0 and content["gpus"]
    assert content["edges"]["jobs"]["sum"]["gb_per_s"] > 0

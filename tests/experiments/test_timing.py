"""Interleaved timing, and the commands that show it."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from experiments_samples import small_graph

from datasets.published import Size
from datasets.synthetic import block_model
from experiments import kernels, overhead, step_time
from experiments.helpers import timing
from experiments.helpers.data import prepare
from experiments.helpers.subjects import SUBJECTS, make
from experiments.helpers.timing import busy_loops
from experiments.kernels import (
    edge_jobs,
    measure,
    quantizer_jobs,
)

CPU = torch.device("cpu")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "load", lambda spec, root: small_graph())


@pytest.mark.usefixtures("_small")
class TestStepTime:
    def test_every_model_at_every_level(
        self, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        out = tmp_path / "times.json"
        flags = ["--models", "gcn,gat,gcnii-edge_index", "--rounds", "3", "--bits", "2"]
        flags += ["--levels", "lossless,L1", "--out", str(out)]
        assert step_time.main(flags) == 0
        text = capsys.readouterr().out
        assert "`lossless`" in text and "`L1 2 bit`" in text
        content = json.loads(out.read_text())
        assert (content["bits"], content["rounds"], content["blocks"]) == (2, 3, False)
        assert content["command"].startswith("python -m experiments.step_time --models")
        for found in content["models"].values():
            seconds = found["seconds"]
            # The warm-up is not among them.
            assert {n: len(t) for n, t in seconds.items()} == {"fp32": 3, "lossless": 3, "L1": 3}
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            assert found["median_seconds"] == medians
            assert found["ratio"]["L1"] == medians["L1"] / medians["fp32"]
        changed = out.stat().st_mtime_ns
        assert step_time.main(flags) == 0
        assert out.stat().st_mtime_ns == changed
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        assert step_time.main(flags) == 1
        assert "environment.OMP_WAIT_POLICY None instead of 'passive'" in capsys.readouterr().err

    def test_slowdown_beside_busy_processes(self, tmp_path: Path, capsys) -> None:
        out = tmp_path / "times.json"
        flags = ["--models", "gcn", "--rounds", "1", "--busy", "1", "--blocks", "auto"]
        assert step_time.main([*flags, "--out", str(out)]) == 0
        assert "beside 1 busy" in capsys.readouterr().out
        found = json.loads(out.read_text())["models"]["gcn"]
        medians = found["median_seconds"]
        assert found["slowdown"] == {n: medians[f"{n}, busy"] / medians[n] for n in ("fp32", "L1")}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("--models gcn,gin", "gcnii, gcnii-edge_index (got 'gin')"),
            ("--levels L1,L3", "Expected --levels of L0, lossless, L1, L2, CB2 (got 'L3')"),
            ("--rounds 0", "Expected a whole number from 1 to 10^12"),
        ],
    )
    def test_mistakes_end_in_one_line(self, line: str, words: str, capsys) -> None:
        assert step_time.main(line.split()) == 2
        text = capsys.readouterr().err
        assert words in text and text.count("\n") == 1


class TestInTurn:
    def test_two_steps_in_a_row_and_stock_without_kept_memory(self, monkeypatch) -> None:
        seen: list[object] = []
        monkeypatch.setattr(timing, "training_step", lambda model, *rest: seen.append(model))
        monkeypatch.setattr(timing.memory_policy, "end", lambda: seen.append("end"))
        task = prepare(small_graph(), "csr")
        models = {name: torch.nn.Linear(1, 1) for name in ("fp32", "L1")}
        found = timing.time_models(models, lambda name: task, 0.1, 1, before=1)
        stock, wrapped = models.values()
        turn = ["end", stock, "end", stock, wrapped, wrapped]
        assert seen == ["end", stock, wrapped, *turn, *turn]
        assert found["seconds"].keys() == models.keys() and "slowdown" not in found

    def test_events_stand_around_each_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
        found = timing.time_on(torch.device("cuda"), jobs, 2)
        assert found == {"one": [2.0, 2.0], "two": [3.0, 3.0]}
        turn = ["one", "event", "one", "event", "event", "two", "two", "event", "wait"]
        assert seen == 3 * turn

    def test_launches_are_counted_without_waiting(self, monkeypatch) -> None:
        """Two looks at the clock a round of three calls; the device is waited for outside."""
        seen: list[str] = []
        clock = iter((0.0, 9.0, 10.0, 16.0, 20.0, 23.0, 30.0, 45.0))

        def look() -> float:
            seen.append("clock")
            return next(clock)

        monkeypatch.setattr(timing.time, "perf_counter", look)
        monkeypatch.setattr(timing, "synchronize", lambda device: seen.append("wait"))
        assert timing.launch_seconds(CPU, lambda: seen.append("call"), 3, 3) == 2.0  # of 2, 1, 5
        assert seen == 4 * ["wait", "clock", "call", "call", "call", "clock"] + ["wait"]

    def test_busy_processes_run_beside_their_own_jobs_only(self, monkeypatch) -> None:
        processes: list[subprocess.Popen[bytes]] = []

        def start(line: list[str]) -> subprocess.Popen[bytes]:
            processes.append(subprocess.Popen(line))
            return processes[-1]

        monkeypatch.setattr(timing, "subprocess", SimpleNamespace(Popen=start))

        def come_to(states: str) -> bool:
            for _ in range(1000):  # a signal takes a moment
                stats = [Path(f"/proc/{p.pid}/stat").read_text() for p in processes]
                if {text.rpartition(")")[2].split()[0] for text in stats} <= {*states}:
                    return True
                time.sleep(0.01)
            return False

        with busy_loops(2) as beside:
            assert len(processes) == 2
            assert come_to("T")
            assert beside(lambda: come_to("RS"))()
            assert come_to("T")
            with pytest.raises(ZeroDivisionError):
                beside(lambda: 1 / 0)()
            assert come_to("T")
        assert all(process.returncode for process in processes)


class TestOverhead:
    def test_a_row_for_each_size_and_one_for_mini_batches(self, tmp_path: Path, capsys) -> None:
        out = tmp_path / "overhead.json"
        flags = ["--models", "gat", "--nodes", "300,100", "--degree", "6", "--batch", "120"]
        assert overhead.main([*flags, "--rounds", "1", "--hidden", "5", "--out", str(out)]) == 0
        assert json.loads(out.read_text())["hidden"] == 5
        text = capsys.readouterr().out
        assert "L1 4 bit" in text and "lossless" in text
        rows = json.loads(out.read_text())["models"]["gat"]
        whole = ["full batch, 100 nodes", "full batch, 300 nodes"]
        assert [*rows] == [*whole, "mini-batches of 120 nodes"]
        for found in rows.values():
            medians = found["median_seconds"]
            assert found["ratio"]["L1"] == medians["L1"] / medians["fp32"]
        assert rows[whole[1]]["nodes"] == 300
        assert 0 < rows["mini-batches of 120 nodes"]["edges"] < rows[whole[1]]["edges"]
        # Mini-batches of another graph would have the same name.
        flags[flags.index("300,100")] = "400,100"
        assert overhead.main([*flags, "--rounds", "1", "--hidden", "5", "--out", str(out)]) == 1
        assert "largest 300 instead of 400" in capsys.readouterr().err

    @pytest.mark.long
    def test_compiled_models_of_small_graphs(self, tmp_path: Path, capsys) -> None:
        out = tmp_path / "overhead.json"
        flags = ["--models", "sage", "--nodes", "100", "--hidden", "5", "--levels", "L1"]
        more = ["--batch", "50", "--rounds", "1", "--small", "--compile", "--out", str(out)]
        assert overhead.main([*flags, *more]) == 0
        assert "compiled" in capsys.readouterr().out
        found = json.loads(out.read_text())["models"]["sage"]["full batch, 100 nodes"]
        assert [*found["ratio"]] == ["compiled", "L1"]

    def test_mini_batches_are_subgraphs(self) -> None:
        task = prepare(block_model(Size(200, 2000, 4, 3)), "edge_index")
        batches = overhead.batches_of(task, 50, 3)
        edges = {(int(a), int(b)) for a, b in task.adjacency.t()}
        rows = {tuple(row.tolist()): i for i, row in enumerate(task.x)}
        for batch in batches:
            assert len(batch.x) == len(batch.y) == len(batch.train_idx) == 50
            nodes = [rows[tuple(row.tolist())] for row in batch.x]
            assert {(nodes[a], nodes[b]) for a, b in batch.adjacency.t().tolist()} == {
                (a, b) for a, b in edges if a in nodes and b in nodes
            }
            assert torch.equal(batch.y, task.y[nodes])
        assert not torch.equal(batches[0].x, batches[1].x)

    @pytest.mark.parametrize("flags", [["--models", "gcn"], ["--nodes", "1,x"], ["--levels", "L3"]])
    def test_flags_that_are_wrong(self, flags: list[str], capsys) -> None:
        assert overhead.main(flags) == 2
        assert "Expected" in capsys.readouterr().err


class TestSubjects:
    def test_models_are_those_of_the_design(self) -> None:
        gcn, gat, gcnii = (SUBJECTS[name].make(128, 40) for name in ("gcn", "gat", "gcnii"))
        assert [conv.out_channels for conv in gcn.convs] == [256, 256, 40]
        assert [(c.heads, c.out_channels) for c in gat.convs] == [(3, 64), (3, 64), (3, 40)]
        assert [conv.channels for conv in gcnii.convs] == [256] * 16
        assert SUBJECTS["gcn-edge_index"].make(128, 40).convs[0].normalize

    @pytest.mark.parametrize("name", SUBJECTS)
    def test_every_make_gives_the_same_weights_and_the_same_dropout(self, name: str) -> None:
        subject = SUBJECTS[name]
        task = prepare(small_graph(), subject.layout)
        first, second = (make(subject, task)(task.x, task.adjacency) for _ in range(2))
        assert torch.equal(first, second)
        assert first.shape == (60, 3)


class TestKernels:
    def test_table_and_file_hold_every_width(self, tmp_path: Path, capsys) -> None:
        out = tmp_path / "kernels.json"
        flags = ["--elements", "10_000", "--bits", "1-2,8", "--rounds", "3", "--threads", "1"]
        threads = torch.get_num_threads()
        assert kernels.main([*flags, "--nodes", "50", "--out", str(out)]) == 0
        assert torch.get_num_threads() == threads
        text = capsys.readouterr().out
        assert "1 thread, " in text and "10,000 float32, 3 rounds" in text
        assert "pack / copy" in text and "unpack / clone" in text and "GATv2's weights" in text
        content = json.loads(out.read_text())
        assert (content["elements"], content["bits"], content["threads"]) == (10_000, [1, 2, 8], 1)
        jobs = content["jobs"]
        names = [f"{job} {bits}" for bits in (1, 2, 8) for job in ("pack", "unpack")]
        assert list(jobs) == ["copy", "clone", *names]
        for job in (*jobs.values(), *content["edges"]["jobs"].values()):
            assert len(job["milliseconds"]) == 3 and min(job["milliseconds"]) > 0  # no warm-up
            assert job["median_milliseconds"] == statistics.median(job["milliseconds"])
        times = jobs["pack 2"]["median_milliseconds"] / jobs["copy"]["median_milliseconds"]
        assert kernels.quantizer(jobs).rows[1][3] == f"{times:.2f}"
        assert len(kernels.by_kernel(content["edges"]["jobs"]).rows) == 5

    @pytest.mark.parametrize("text", ["", "0-3", "17", "3-1", "a", "1-", "-1", "1.5"])
    def test_widths_that_make_no_sense(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError, match=r"Expected (widths|seeds)"):
            kernels.parse_widths(text)

    @pytest.mark.parametrize(
        ("line", "code", "words"),
        [
            ("--elements 0", 2, "Expected a whole number from 1 to 10^12"),
            ("--dtype float16 --bits 1-16", 2, "Expected --bits below the 16 of float16"),
            ("--dtype int8", 2, "invalid choice: 'int8'"),
            ("--device tpu", 2, "Expected --device cpu, cuda or cuda:N (got 'tpu')"),
            ("--elements 9 --bits 1 --out /dev/null/all.json", 1, "Expected to be able to write"),
            ("--elements 9 --out all", 2, "Expected a path that ends in .json (got all)"),
        ],
    )
    def test_mistakes_end_in_one_line(self, line: str, code: int, words: str, capsys) -> None:
        assert kernels.main(line.split()) == code
        text = capsys.readouterr().err
        assert words in text and text.count("\n") == 1

    def test_speeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "time_on", lambda *_: {"copy": [0.001, 0.002, 0.009]})
        found = measure({"copy": kernels.Job(lambda: None, 8_000_000)}, 3, CPU)
        assert (found["copy"]["gb_per_s"], found["copy"]["bytes"]) == (4.0, 8_000_000)

    def test_sums_over_edges_move_more_than_they_gather(self) -> None:
        jobs = edge_jobs(50, CPU)
        gathered = 800 * 192 * 4
        for name, job in jobs.items():
            assert (job.moved > gathered) == (not name.endswith("GAT's weights"))

    @pytest.mark.gpu
    def test_cuda_reads_the_clock_of_the_device(self) -> None:
        device = torch.device("cuda")
        found = measure(quantizer_jobs(1 << 20, (2,), torch.float16, device), 2, device)
        assert found["pack 2"]["gb_per_s"] > 0
        flags = ["--device", "cuda", "--elements", "1000", "--bits", "2", "--nodes", "1000"]
        assert kernels.main([*flags, "--rounds", "1"]) == 0

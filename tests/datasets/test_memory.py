"""A graph that cannot fit into memory raises an error before it is loaded."""

from __future__ import annotations

import pytest

from datasets import DatasetError, memory


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (130e6, "130.0 MB"),
        (5.944e9, "5.9 GB"),
        (10**16, "10.0 PB"),
        (10**300, "1e+285 PB"),
    ],
)
def test_format_bytes(size, text):
    assert memory.format_bytes(size) == text


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def make(meminfo, limit):
        for name, text in (("meminfo", meminfo), ("limit", limit)):
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "_LIMITS", (tmp_path / "limit", tmp_path / "absent"))

    return make


LINUX = "MemTotal: 9 kB\nMemAvailable:    2000 kB\nSwapFree:  500 kB\n"


@pytest.mark.parametrize(
    ("limit", "available"), [("max", 2500 * 1024), ("1000", 1000), ("9000000000", 2500 * 1024)]
)
def test_the_least_of_machine_and_container_counts(machine, limit, available):
    machine(LINUX, limit)
    assert memory.available_bytes() == available


def test_without_linux_it_is_what_is_installed(machine):
    machine("", "")
    assert memory.available_bytes() > 2**28


def test_what_does_not_fit_is_refused_with_the_numbers(machine):
    machine(LINUX, "max")
    memory.check_fits("it", 2500 * 1024, "no way out needed")
    words = r"^Expected it to fit into the 2.6 MB of memory .*\(got at least 2.6 MB\); leave$"
    with pytest.raises(DatasetError, match=words):
        memory.check_fits("it", 2500 * 1024 + 1, "leave")


def test_where_memory_is_unknown_nothing_is_refused(machine, monkeypatch):
    machine("", "")
    monkeypatch.delattr("os.sysconf")
    memory.check_fits("it", 10**30, "no way out needed")

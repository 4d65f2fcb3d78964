"""``python -m gact_graph.info``."""

import torch
import torch_geometric

import gact_graph
from gact_graph import info
from gact_graph.ops import cpu


def test_main_prints_versions_and_kernels(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert info.main() == 0
    text = capsys.readouterr().out
    for words in (torch.__version__, torch_geometric.__version__, gact_graph.__version__):
        assert words in text
    assert "CPU kernels" in text and "CUDA kernels" in text


def test_it_builds_nothing(monkeypatch, tmp_path):
    built = cpu.load() is not None
    assert info.facts()["CPU kernels"].startswith("built: ") == built
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not info.facts()["CPU kernels"].startswith("built: ")
    assert not [*tmp_path.iterdir()]


def test_cxx_names_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = "Expected CXX to name a C++ compiler on PATH (got 'no-such-compiler')"
    fact = info.facts()["CPU kernels"]
    assert fact.startswith(("built: ", "not built yet: ")) and fact.endswith(f"; {message}")
    monkeypatch.setenv("PATH", "")
    fact = info.facts()["CPU kernels"]
    assert fact.startswith("cannot be built: ") and fact.endswith(f"; {message}")
    assert info.facts()["freed CPU memory"].startswith("not kept: ")
    monkeypatch.delenv("CXX")
    assert "found none of: c++, g++, clang++" in info.facts()["CPU kernels"]


def test_paths_with_brackets_are_shown(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/opt/[/gcc]/g++")
    assert info.main() == 0
    assert "[/gcc]" in capsys.readouterr().out.replace("\n", "")


def test_an_unknown_processor_takes_plain_loops(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE4096")
    assert cpu.variant() == "DEFAULT"
    fact = info.facts()["CPU kernels"]
    assert fact.endswith("; plain loops serve, since SVE4096 is not known")

"""``python -m gact_graph.info``."""

import torch
import torch_geometric

import gact_graph
from gact_graph import info
from gact_graph.ops import cpu
from gact_graph.ops.kernels import cache, compiler


def test_main_prints_what_was_found(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert info.main() == 0
    text = capsys.readouterr().out
    for words in (torch.__version__, torch_geometric.__version__, gact_graph.__version__):
        assert words in text
    assert "CPU kernels" in text and "CUDA kernels" in text


def test_it_looks_and_builds_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(info.compiler, "compile_library", None)
    monkeypatch.setattr(info.cpu, "compile_library", None)
    assert info.facts()["CPU kernels"].startswith("not built yet: the first step runs ")
    assert not [*tmp_path.iterdir()]
    name = cpu._name(compiler.commands()[0], cpu._flags(cpu._vector_flags()))
    path = cache.keep(f"{name}.so", b"what an earlier process has built")
    assert info.facts()["CPU kernels"] == f"built: {path}"


def test_what_cxx_names_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = "Expected CXX to name a C++ compiler on PATH (got 'no-such-compiler')"
    found = info.facts()["CPU kernels"]
    assert found.startswith(("built: ", "not built yet: ")) and found.endswith(f"; {told}")
    monkeypatch.setenv("PATH", "")
    assert info.facts()["CPU kernels"] == f"cannot be built: {told}"
    monkeypatch.delenv("CXX")
    assert "found none of: c++, g++, clang++" in info.facts()["CPU kernels"]

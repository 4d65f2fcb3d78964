"""``python -m gact_graph.info``."""

import torch
import torch_geometric

import gact_graph
from gact_graph import info


def test_main_prints_what_was_found(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert info.main() == 0
    text = capsys.readouterr().out
    for words in (torch.__version__, torch_geometric.__version__, gact_graph.__version__):
        assert words in text
    assert "CPU kernels" in text and "CUDA kernels" in text


def test_a_failed_build_tells_its_cause(monkeypatch):
    import warnings

    def load():
        warnings.warn("no compiler here", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(info.cpu, "load", load)
    assert info.facts()["CPU kernels"] == "not built: no compiler here"


def test_a_build_that_failed_earlier(monkeypatch):
    monkeypatch.setattr(info.cpu, "load", lambda: None)
    assert "failed earlier" in info.facts()["CPU kernels"]

"""Versions of torch and PyG: which are accepted, and what is said of others."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric
from packaging.requirements import Requirement

import gact_graph.support
from gact_graph import info
from gact_graph.support.versions import check_versions, pyg_here, torch_here

ROOT = Path(__file__).resolve().parents[2]


def test_these_serve():
    check_versions()


@pytest.mark.parametrize(
    ("module", "found", "message"),
    [
        (torch, "2.9.1+cu128", r"torch 2.10 or newer \(got 2.9.1\+cu128\): .* 'torch>=2.10'"),
        (torch, "1.13.0", r"torch 2.10 or newer \(got 1.13.0\)"),
        (
            torch_geometric,
            "2.5.3",
            r"torch-geometric 2.6 or newer \(got 2.5.3\): .* 'torch-geometric>=2.6'",
        ),
    ],
)
def test_an_old_version_is_refused(monkeypatch, module, found, message):
    monkeypatch.setattr(module, "__version__", found)
    with pytest.raises(ImportError, match=f"^Expected {message}"):
        check_versions()


@pytest.mark.parametrize(("module", "found"), [(torch, "3.0.0a0+git1"), (torch_geometric, "2.9.0")])
def test_a_new_version_is_accepted_and_named(monkeypatch, module, found):
    monkeypatch.setattr(module, "__version__", found)
    check_versions()
    said = info.facts()[module.__name__]
    assert re.fullmatch(rf"{re.escape(found)}, not tested: the newest tested is 2\.\d+", said)


def test_a_torch_without_a_private_name_is_refused(monkeypatch):
    name = "gact_graph.support.torch_private"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(gact_graph.support, "torch_private")
    monkeypatch.delattr(torch, "_neg_view")
    message = (
        r"^Expected torch 2\.10 to 2\.\d+ \(got .*'_neg_view'.*\): pip install 'torch==2\.\d+\.\*'$"
    )
    with pytest.raises(ImportError, match=message) as error:
        check_versions()
    assert error.value.__suppress_context__


def test_the_bounds_of_the_package_and_of_the_matrix_are_these():
    project, matrix = ROOT / "pyproject.toml", ROOT / ".ci" / "versions.py"
    if not matrix.exists():
        pytest.skip("not a source tree")
    for package, tested in zip(
        (torch_here(), pyg_here()),
        (runpy.run_path(str(matrix))[n] for n in ("TORCH", "PYG")),
        strict=True,
    ):
        line = re.search(rf'"({package.name}>=[^"]*)"', project.read_text())
        assert line is not None
        accepted = Requirement(line[1]).specifier
        assert tested[0].startswith(f"{package.oldest}.") and f">={package.oldest}" in str(accepted)
        assert tested[-1].startswith(f"{package.newest}.")
        assert all(accepted.contains(version) for version in tested)

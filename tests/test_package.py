"""The package: its wheel, an import that stays light, its public names and its version."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import gact_graph

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter that finds the working tree from another folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gact_graph", "csrc", "datasets", "experiments", "tests"):
        shutil.copytree(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.long
def test_the_wheel_holds_the_library_alone(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"gact_graph", f"gact_graph-{gact_graph.__version__}.dist-info"}


@pytest.mark.long
def test_the_wheel_holds_every_source(wheel: zipfile.ZipFile) -> None:
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "gact_graph").rglob("*.py")}
    kernels = {
        f"gact_graph/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file()
    }
    assert "gact_graph/csrc/noise.h" in kernels
    templates = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gact_graph").rglob("templates/*")
        if path.suffix in (".html", ".css", ".js")
    }
    assert "gact_graph/api/report/templates/page.html" in templates
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == modules | kernels | templates | {"gact_graph/py.typed"}


@pytest.mark.long
def test_kernels_are_found_in_an_installed_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from gact_graph.ops.kernels.sources import csrc; print(csrc())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "gact_graph" / "csrc"), done.stderr


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel with libraries that ``make wheel`` builds."""
    pytest.importorskip("auditwheel")
    folder = tmp_path_factory.mktemp("prebuilt")
    command = [sys.executable, str(ROOT / ".ci" / "prebuild.py"), str(wheel.filename), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    assert platform.machine() in path.name
    assert platform.system() != "Linux" or "manylinux" in path.name
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


_STEP = """
import sys, warnings
import torch
from torch_geometric.nn import GCN
warnings.simplefilter("always")
import gact_graph
from gact_graph import info
from gact_graph.ops import cpu
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = gact_graph.wrap(GCN(16, 16, 2), bits=4, min_bytes=0)
    model(torch.randn(100, 16), torch.randint(100, (2, 500))).sum().backward()
print(len(caught), *(str(warning.message) for warning in caught))
print("kernels" if cpu.load() else "reference")
facts = info.facts()
print(facts["CPU kernels"])
print(facts["CPU allocator"])
"""


def _step(installed: Path, folder: Path) -> list[str]:
    """What a training step without a compiler reports: warnings, kernels and libraries."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": ""}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, "-c", _STEP], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "cache").exists()
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_wheel_with_libraries_needs_no_compiler(installed: Path, tmp_path: Path) -> None:
    warned, serves, kernels, allocator = _step(installed, tmp_path)
    assert (warned, serves) == ("0", "kernels")
    folder = installed / "gact_graph" / "ops" / "kernels" / "libraries"
    variant = torch.backends.cpu.get_cpu_capability()
    assert kernels == f"prebuilt: {folder / f'cpu-{variant}.so'}"
    assert allocator.startswith(f"prebuilt: {folder / 'allocator-torch'}")


@pytest.mark.long
def test_a_library_that_does_not_load_gets_one_line(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken)
    for library in broken.rglob("cpu-*.so"):
        library.write_bytes(b"of another system")
    warned, serves, kernels, _ = _step(broken, tmp_path)
    assert serves == "reference"
    assert warned.startswith("1 gact_graph could not build its CPU kernels and works with slower")
    assert re.search(rf"cpu-\w+ does not load with torch {re.escape(torch.__version__)}: ", warned)
    assert kernels.startswith("cannot be built: cpu-") and "Expected a C++ compiler" in kernels


def test_import_is_light(tmp_path: Path) -> None:
    """It compiles nothing, writes no file, opens no socket and loads no optional package."""
    code = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        raise AssertionError(f"{event} {args}")
import torch, torch_geometric, torch_geometric.nn
sys.addaudithook(refuse)
import gact_graph
for name in ("torch.utils.cpp_extension", "matplotlib", "plotly", "lightning", "cuda.core"):
    assert name not in sys.modules, name
"""
    cache = tmp_path / "cache"
    done = run(code, tmp_path, PATH="", TORCH_EXTENSIONS_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert not cache.exists()


def test_the_public_names_are_there() -> None:
    assert {"compress", "report", "unwrap", "wrap"} <= set(gact_graph.__all__)
    for name in gact_graph.__all__:
        assert hasattr(gact_graph, name), name


def test_the_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == gact_graph.__version__


def test_the_installed_version_is_this_one() -> None:
    try:
        installed = metadata.version("gact-graph")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed: run from the source tree")
    assert installed == gact_graph.__version__


@pytest.mark.long
def test_make_installs_a_torch_that_the_package_takes(wheel: zipfile.ZipFile) -> None:
    (pinned,) = re.findall(
        r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    (text,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
    fields = wheel.read(text).decode().splitlines()
    requirements = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in fields
        if line.startswith("Requires-Dist: ")
    ]
    assert "Requires-Python: >=3.10" in fields
    (torch,) = (r for r in requirements if r.name == "torch")
    assert pinned in torch.specifier
    assert {r.name for r in requirements if r.marker is None} == {
        "torch",
        "torch-geometric",
        "numpy",
        "highspy",
        "rich",
        "jinja2",
    }

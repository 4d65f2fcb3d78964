"""``make docs-version`` commits the pages of each version to a branch of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gact_graph

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_a_version_keeps_its_folder_and_its_names(tmp_path: Path) -> None:
    pytest.importorskip("mike")
    clone, version = tmp_path / "clone", gact_graph.__version__.rpartition(".")[0]
    environment = os.environ | {
        f"GIT_{who}_{what}": "test@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    mike = str(Path(sys.prefix) / "bin" / "mike")
    run("make", "-o", f"{sys.prefix}/.installed", "docs-version", f"VENV={sys.prefix}")
    run(mike, "alias", version, "first")
    run("make", "-o", f"{sys.prefix}/.installed", "docs-version", f"VENV={sys.prefix}")
    [found] = json.loads(run("git", "show", "gh-pages:versions.json"))
    assert found["version"] == version and set(found["aliases"]) == {"first", "latest"}
    assert "latest/" in run("git", "show", "gh-pages:index.html")
    pages = run("git", "ls-tree", "-r", "--name-only", "gh-pages").splitlines()
    assert {f"{version}/index.html", f"{version}/gpu.html"} <= {*pages}
    assert run("git", "status", "--porcelain") == ""

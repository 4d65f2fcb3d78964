"""The release script: what it refuses, and the tag of a release that nothing speaks against."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from repository import commit, git

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "release.py"


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository whose page has numbers of its present library."""
    monkeypatch.chdir(tmp_path)
    for name in ("NAME", "EMAIL"):
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", "a")
    git("init", "--initial-branch", "main")
    for folder in ("gact_graph", "csrc", "docs"):
        Path(folder).mkdir()
    Path("gact_graph/__init__.py").write_text('__version__ = "1.2.0"\n')
    Path("CHANGELOG.md").write_text("## [1.2.0]\n")
    number = commit()
    Path("README.md").write_text(f"3 MB, commit {number}\n")
    commit()


def release(version: str = "1.2.0") -> list[str]:
    done = subprocess.run([sys.executable, SCRIPT, version], capture_output=True, text=True)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr.splitlines()


def test_a_release_gets_a_tag() -> None:
    assert release() == []
    assert git("tag", "--list") == "v1.2.0"
    assert "(got 1.2.0)" in release()[0]


def test_a_page_that_says_unreleased() -> None:
    text = Path("README.md").read_text()
    Path("README.md").write_text(f"{text}Version 1.2.0, unreleased\n")
    Path("CHANGELOG.md").write_text("## [1.2.0] - unreleased\n")
    commit()
    first, second = release()
    assert "beside 1.2.0 in README.md (got one)" in first and "in CHANGELOG.md" in second


def test_numbers_of_an_older_library() -> None:
    Path("csrc/kernel.cpp").write_text("int x;\n")
    Path("docs/page.md").write_text("4 MB, commit 1234567\n")
    Path("docs/gpu.md").write_text("Of another machine: 5 MB, commit 1234567\n")
    commit()
    first, second = release()
    assert "README.md (got those of commit " in first
    assert "docs/page.md (got those of commit 1234567)" in second
    assert not git("tag", "--list")


def test_comments_and_docstrings_do_not_change_numbers() -> None:
    code = Path("gact_graph/code.py")
    code.write_text('def f():\n    """Return 1."""\n    return 1\n')
    number = commit()
    Path("README.md").write_text(f"3 MB, commit {number}\n")
    code.write_text('# Why.\ndef f():\n    """Return one."""\n    return 1  # here\n')
    commit()
    assert release() == []
    code.write_text('def f():\n    """Return one."""\n    return 2\n')
    commit()
    assert f"README.md (got those of commit {number})" in release("1.2.0")[-1]


def test_a_commit_that_says_that_it_changes_no_number() -> None:
    Path("csrc/kernel.cpp").write_text("int x;\n")
    commit("A better message\n\nNumbers: unchanged")
    assert release() == []
    Path("csrc/kernel.cpp").write_text("int y;\n")
    commit("Other numbers\n\nNumbers: unchanged as far as I know")
    assert "README.md" in release()[-1]


def test_other_obstacles() -> None:
    git("checkout", "-b", "topic")
    Path("note").write_text("not committed\n")
    reasons = release("1.3.0")
    for words in ("clean working tree", "branch main", "__version__", r"section [1.3.0]"):
        assert any(words in reason for reason in reasons), words
    assert not git("tag", "--list")

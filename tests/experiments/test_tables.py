"""The tables of the pages, filled in from the files in results/, and their origins."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from repository import commit, git

import gact_graph
from experiments import tables
from experiments.helpers import origin, pictures, result_tables
from experiments.helpers.errors import ResultsError


def copy_of_the_pages(folder: Path) -> Path:
    shutil.copy(tables.ROOT / "README.md", folder)
    for name in ("docs", "results"):
        shutil.copytree(tables.ROOT / name, folder / name)
    return folder


class TestThePages:
    def test_show_what_the_results_hold(self) -> None:
        assert tables.main(["--check"]) == 0

    def test_a_number_that_differs_from_its_file_is_found_and_mended(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        root = copy_of_the_pages(tmp_path)
        monkeypatch.setattr(tables, "ROOT", root)
        path = root / "results" / "peers" / "gat.json"
        found = json.loads(path.read_text())
        found["variants"]["L1-4+blocks"]["peak_bytes"] = 123_456_789
        path.write_text(json.dumps(found))
        assert tables.main(["--check"]) == 1
        assert "README.md" in capsys.readouterr().err
        assert "123 MB" not in (root / "README.md").read_text()
        assert tables.main([]) == 0
        assert "| 123 MB |" in (root / "README.md").read_text()
        assert tables.main(["--check"]) == 0

    def test_every_table_of_numbers_names_its_command_commit_and_version(self) -> None:
        made = result_tables.tables(tables.ROOT / "results")
        for name, make in made.items():
            if not name.startswith("paper"):
                assert re.search(r"`(\w+=\S+ )*python -m experiments\.", make()), name
                assert "gact_graph 0." in make() and "cores" in make(), name
                assert re.search(r", commit [0-9a-f]{7}", make()), name

    def test_a_file_of_another_commit_fails_the_check_of_a_table(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        root = copy_of_the_pages(tmp_path)
        monkeypatch.setattr(tables, "ROOT", root)
        path = root / "results" / "table3" / "1GB.json"
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"commit": "0123456+changes"}))
        assert tables.main([]) == 1
        errors = capsys.readouterr().err
        assert "numbers of table table3 to stem from one commit" in errors

    def test_every_table_is_shown_somewhere(self) -> None:
        pages = [tables.ROOT / "README.md", *(tables.ROOT / "docs").rglob("*.md")]
        text = "".join(page.read_text() for page in pages)
        for name in result_tables.tables(tables.ROOT / "results"):
            assert f"<!-- table: {name} -->" in text, name


class TestFill:
    def test_text_around_a_table_stays(self) -> None:
        text = "before\n<!-- table: a -->\nold\n<!-- end -->\nafter"
        filled = tables.fill(text, {"a": lambda: "new"}, "page")
        assert filled == "before\n<!-- table: a -->\n\nnew\n\n<!-- end -->\nafter"
        assert tables.fill(filled, {"a": lambda: "new"}, "page") == filled

    def test_an_unknown_table_is_refused_by_name(self) -> None:
        with pytest.raises(ResultsError, match=r"tables of page to be among a \(got 'b'\)"):
            tables.fill("<!-- table: b -->\n<!-- end -->", {"a": str}, "page")


class TestCommits:
    ONE = "<small>`a`; gact_graph 0.7.0, commit 1111111, torch 2.</small>"
    TWO = ONE + "\n<small>`b`; gact_graph 0.7.0, commit 2222222+changes, torch 2.</small>"

    def test_one_commit_needs_no_column(self) -> None:
        result_tables.check_commits("t", f"| a |\n| --- |\n| 1 |\n\n{self.ONE}")

    def test_two_commits_are_refused_unless_the_rows_name_them(self) -> None:
        rows = "| a | commit |\n| --- | --- |\n| 1 | 1111111 |\n| 2 | 2222222+changes |"
        result_tables.check_commits("t", f"{rows}\n\n{self.TWO}")
        for missing in ("| a |\n| --- |\n| 1 |", rows.rpartition("\n")[0]):
            with pytest.raises(ResultsError, match=r"\(got 1111111, 2222222\+changes\)"):
                result_tables.check_commits("t", f"{missing}\n\n{self.TWO}")


class TestOrigin:
    def test_names_the_commit_and_changes_of_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        source = tmp_path / "gact_graph" / "__init__.py"
        source.parent.mkdir()
        source.write_text("")
        monkeypatch.setattr(gact_graph, "__file__", str(source))
        assert origin.commit() is None
        git("init")
        head = commit()
        assert origin.commit() == head
        (tmp_path / "notes.md").write_text("new")
        assert origin.commit() == head
        new = source.with_name("new.py")
        new.write_text("")
        assert origin.commit() == f"{head}+changes"
        new.unlink()
        source.write_text("changed = 1\n")
        assert origin.commit() == f"{head}+changes"

    def test_names_command_machine_and_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MALLOC_CONF", "background_thread:true")
        found = origin.origin("memory", ["--model", "gat", "--dataset", "/x/y/cora.npz"])
        assert found["command"] == (
            "python -m experiments.memory --model gat --dataset DATA/cora.npz"
        )
        assert found["environment"]["MALLOC_CONF"] == "background_thread:true"
        assert "cores" in found["machine"]
        assert {"gact_graph", "torch", "torch_geometric"} <= found["versions"].keys()

    def test_folders_of_one_machine_are_not_named(self) -> None:
        flags = ["--data", "/home/me/data", "--out", "/tmp/x", "--bits", "4"]
        assert origin.command("generality", flags) == (
            "python -m experiments.generality --data DATA --out DIR --bits 4"
        )


class TestPictures:
    def test_a_dark_twin_has_no_color_of_the_light_one(self) -> None:
        found = pictures.pictures(tables.ROOT)
        for path, text in found.items():
            if path.name.endswith("-dark.svg"):
                assert "#24292f" not in text and "#e6edf3" in text, path

    def test_a_color_without_a_dark_one_is_refused(self, tmp_path: Path) -> None:
        root = copy_of_the_pages(tmp_path)
        (root / "docs" / "images" / "new-light.svg").write_text('<svg fill="#123456"/>')
        with pytest.raises(ResultsError, match="got #123456"):
            pictures.pictures(root)

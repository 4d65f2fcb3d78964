from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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

    def test_every_table_of_numbers_names_its_command_and_version(self) -> None:
        made = result_tables.tables(tables.ROOT / "results")
        for name, make in made.items():
            if not name.startswith("paper"):
                assert "`python -m experiments." in make(), name
                assert "gact_graph 0." in make() and "cores" in make(), name

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


class TestOrigin:
    def test_names_command_machine_and_versions(self) -> None:
        found = origin.origin("memory", ["--model", "gat", "--dataset", "/x/y/cora.npz"])
        assert found["command"] == (
            "python -m experiments.memory --model gat --dataset DATA/cora.npz"
        )
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

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from experiments_samples import config, record

from experiments.helpers.errors import ResultsError
from experiments.helpers.results import open_results


def test_resumes_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "folder"
    results = open_results(out, config())
    assert results.runs == []
    results.add(record(3))
    results.add(record(1))
    results.write(out)
    again = open_results(out, config())
    assert again == results
    assert again.seeds == [1, 3]


def test_file_has_the_promised_keys(tmp_path: Path) -> None:
    results = open_results(tmp_path, config())
    results.add(record(0))
    results.write(tmp_path)
    content = json.loads((tmp_path / "result.json").read_text())
    assert content.keys() == {"config", "versions", "runs"}
    assert {"torch", "torch_geometric", "gact_graph", "numpy", "python"} == content[
        "versions"
    ].keys()
    promised = (
        "seed test_score val_score best_epoch rate raw_bytes stored_bytes peak_bytes "
        "epoch_seconds train_seconds passes loss val_curve"
    )
    assert set(promised.split()) <= content["runs"][0].keys()


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    results = open_results(tmp_path, config())
    results.add(record(0, loss=[1.0, math.nan], rate=math.inf))
    results.write(tmp_path)
    assert "NaN" not in (tmp_path / "result.json").read_text()
    (run,) = open_results(tmp_path, config()).runs
    assert (run["loss"], run["rate"]) == ([1.0, None], None)


def test_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    open_results(tmp_path, config()).write(tmp_path)
    with pytest.raises(ResultsError) as caught:
        open_results(tmp_path, config(lr=0.1, bits=2))
    text = str(caught.value)
    assert "(got bits 4 instead of 2, lr 0.01 instead of 0.1)" in text
    assert "\n" not in text


def test_key_that_only_one_side_has_is_refused(tmp_path: Path) -> None:
    open_results(tmp_path, config(extra=1)).write(tmp_path)
    with pytest.raises(ResultsError, match="got extra 1 instead of None"):
        open_results(tmp_path, config())


def test_other_versions_are_refused(tmp_path: Path) -> None:
    open_results(tmp_path, config()).write(tmp_path)
    path = tmp_path / "result.json"
    content = json.loads(path.read_text())
    content["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"versions.torch '1.0' instead of"):
        open_results(tmp_path, config())


ONE_RUN = json.dumps({"config": {}, "versions": {}, "runs": [record(0)]})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ('{"config": {}, "versi', "no JSON"),
        ("[]", "no keys config, versions and runs"),
        ('{"config": {}, "runs": []}', "no keys config, versions and runs"),
        ('{"config": [], "versions": {}, "runs": []}', "of another type"),
        ('{"config": {}, "versions": {}, "runs": [3]}', "run 0 without a proper 'seed'"),
        (
            ONE_RUN.replace('"loss"', '"lost"'),
            "run 0 without a proper 'loss'",
        ),
        (ONE_RUN.replace("7.5", "NaN"), "no JSON: NaN is no JSON"),
        (ONE_RUN.replace("7.5", "9" * 5000), "no JSON"),
        ("[" * 100_000, "no JSON"),
        (ONE_RUN.replace("1.25]", '"x"]'), "'loss' that holds other than numbers"),
        (ONE_RUN.replace('"best_epoch": 2', '"best_epoch": 3'), "curves that lack its best epoch"),
        (ONE_RUN.replace('"slot"', '"plot"'), "run 0 without proper 'contexts'"),
        (
            json.dumps({"config": {}, "versions": {}, "runs": [record(0), record(0)]}),
            "one seed twice",
        ),
        (
            ONE_RUN.replace("7.5", '"much"'),
            "run 0 without a proper 'rate'",
        ),
    ],
)
def test_broken_file_is_told_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ResultsError, match=reason) as caught:
        open_results(tmp_path, config())
    assert "\n" not in str(caught.value)
    assert (tmp_path / "result.json").read_text() == text


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResultsError, match="Expected --out"):
        open_results(tmp_path, config())


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="Expected --out to be a folder"):
        open_results(tmp_path / "file", config())


def test_without_a_folder_nothing_is_kept() -> None:
    assert open_results(None, config()).runs == []

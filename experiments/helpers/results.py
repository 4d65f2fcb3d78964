"""``result.json``: written whole after every seed, read back to go on where a run stopped."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch_geometric

import gact_graph
from experiments.helpers.atomic import write_atomically
from experiments.helpers.errors import ResultsError

FILE_NAME = "result.json"
_NUMBER: tuple[type, ...] = (int, float, type(None))  # None: NaN, or unknown
_RECORD: dict[str, type | tuple[type, ...]] = {
    "seed": int,
    "test_score": _NUMBER,
    "val_score": _NUMBER,
    "best_epoch": int,
    "rate": _NUMBER,
    "raw_bytes": int,
    "stored_bytes": int,
    "average_bits": _NUMBER,
    "peak_bytes": (int, type(None)),
    "epoch_seconds": _NUMBER,
    "train_seconds": _NUMBER,
    "measuring_seconds": _NUMBER,
    "passes": int,
    "loss": list,
    "val_curve": list,
    "contexts": list,
}
_CONTEXT = {"slot": str, "role": str, "codec": str, "raw_bytes": int, "stored_bytes": int}


@dataclass
class Results:
    """All seeds of one configuration.

    Attributes:
        config: Whatever changes a run's numbers, flat; the seeds are not in it, so that more
            can be added later.
        versions: Of Python and the libraries a run stands on.
        runs: One record a seed, in the order of seeds; see :func:`experiments.helpers.train.train`.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """The seeds that are done, ascending."""
        return [run["seed"] for run in self.runs]

    def add(self, record: dict[str, Any]) -> None:
        """Add one seed's record; NaN and infinities become ``None``, for JSON has no such word."""
        self.runs.append(_jsonable(record))
        self.runs.sort(key=lambda run: run["seed"])

    def write(self, out: Path) -> None:
        """Write ``out/result.json`` whole or not at all.

        Raises:
            ResultsError: If the system refuses.
        """
        content = {"config": self.config, "versions": self.versions, "runs": self.runs}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(out / FILE_NAME, text.encode())


def current_versions() -> dict[str, str]:
    """Versions of Python and of the libraries whose change may change a run's numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "numpy": numpy.__version__,
        "gact_graph": gact_graph.__version__,
    }


def open_results(out: Path | None, config: dict[str, Any]) -> Results:
    """Return what ``out`` holds of this configuration, or empty results.

    Args:
        out: Folder of the results, made where missing; ``None`` keeps them in memory only.
        config: The configuration about to run.

    Raises:
        ResultsError: If the folder holds another configuration's results (the text names the
            keys that differ), a broken file, or cannot be made or read.
    """
    versions = current_versions()
    if out is None:
        return Results(config, versions)
    path = out / FILE_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(
            f"Expected --out to be a folder to read and write (got {error})"
        ) from None
    if text is None:
        return Results(config, versions)
    found = _parsed(path, text)
    differing = _differing(found, config, versions)
    if differing:
        raise ResultsError(
            f"Expected {path} to be of this configuration (got {', '.join(differing)}): "
            "give another --out, or the configuration it was made with"
        )
    return found


def _parsed(path: Path, text: str) -> Results:
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"no JSON: {error}") from None
    if not isinstance(content, dict) or not {"config", "versions", "runs"} <= content.keys():
        raise _broken(path, "no keys config, versions and runs")
    config, versions, runs = content["config"], content["versions"], content["runs"]
    if not isinstance(config, dict) or not isinstance(versions, dict) or not isinstance(runs, list):
        raise _broken(path, "config, versions or runs of another type")
    for number, run in enumerate(runs):
        for key, kind in _RECORD.items():
            if not isinstance(run, dict) or key not in run or not isinstance(run[key], kind):
                raise _broken(path, f"run {number} without a proper {key!r}")
        for key in ("loss", "val_curve"):
            if not all(isinstance(value, _NUMBER) for value in run[key]):
                raise _broken(path, f"run {number} with a {key!r} that holds other than numbers")
        if not 1 <= run["best_epoch"] <= len(run["val_curve"]) == len(run["loss"]):
            raise _broken(path, f"run {number} with curves that lack its best epoch")
        for context in run["contexts"]:
            if (
                not isinstance(context, dict)
                or not _CONTEXT.items()
                <= {key: type(value) for key, value in context.items()}.items()
            ):
                raise _broken(path, f"run {number} without proper 'contexts'")
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise _broken(path, "one seed twice")
    return Results(config, versions, runs)


def _refuse_constant(word: str) -> None:
    """JSON has no NaN; Python's reader lets it through, and the next write would fail."""
    raise ValueError(f"{word} is no JSON")


def _broken(path: Path, reason: str) -> ResultsError:
    return ResultsError(
        f"Expected {path} to be a result of experiments.node_cls (got {reason}): "
        "remove it, or give another --out"
    )


def _differing(found: Results, config: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Name every key that differs, with the value found and the one expected."""
    names = []
    for prefix, there, now in (("", found.config, config), ("versions.", found.versions, versions)):
        for key in sorted(there.keys() | now.keys()):
            if there.get(key) != now.get(key):
                names.append(f"{prefix}{key} {there.get(key)!r} instead of {now.get(key)!r}")
    return names


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

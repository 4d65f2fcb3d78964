"""The result of the main job: one record a seed, and the versions behind them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch_geometric

import gact_graph

FILE_NAME = "result.json"


@dataclass
class Results:
    """All seeds of one configuration.

    Attributes:
        config: All that changes a run's numbers, flat; without the seeds, so that more can be added
            later.
        versions: Of Python and the libraries behind a run.
        runs: One record a seed, by seed; see :func:`experiments.helpers.train.train`.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    runs: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        """The seeds that are done, ascending."""
        return [run["seed"] for run in self.runs]


def current_versions() -> dict[str, str]:
    """Versions of Python and of the libraries whose change may change a run's numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "numpy": numpy.__version__,
        "gact_graph": gact_graph.__version__,
    }

"""The frame of one part of :mod:`experiments.gpu_check`: a command with a device and a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.errors import ExperimentError
from experiments.options import Parser
from experiments.subjects import exit_code, write_json
from experiments.values import parse_device

Save = Callable[[dict[str, Any]], None]
"""Writes what a part has found so far."""


def run_part(
    name: str,
    about: str,
    check: Callable[[torch.device, Save], list[str]],
    argv: list[str] | None = None,
) -> int:
    """Run ``check`` with ``--device`` and ``--out FILE.json``; return the exit code.

    Args:
        name: Of the module in ``experiments``.
        about: One line for ``--help``.
        check: Does the part on a device, saves as it goes, and returns what failed, a line each.
    """

    def work() -> None:
        parser = Parser(prog=f"python -m experiments.{name}", description=about)
        parser.add_argument("--device", help="default: cuda where there is one, else cpu")
        parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
        args = parser.parse_args(argv)
        failed = check(parse_device(args.device), lambda found: write_json(args.out, found))
        if failed:
            raise ExperimentError(f"{len(failed)} failed, the first: {failed[0]}")

    return exit_code(name, work)

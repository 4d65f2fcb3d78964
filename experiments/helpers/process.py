"""Functions called in processes of their own, whose memory holds nothing of earlier work.

The child is ``python -m experiments.helpers.process MODULE:FUNCTION ARGUMENTS``; arguments and
result are JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.cap import ended_by_memory
from experiments.helpers.errors import ExperimentError

OUT_OF_MEMORY = "out of memory"


def call(
    function: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Any:
    """Return the result of a function, or ``{"reason": ...}`` where there is none.

    Args:
        function: ``module:function``.
        *arguments: Of the function.
        environment: In place of this process's.
        limit: Seconds after which the process is ended.
    """
    return call_together(function, [arguments], environment, limit)[0]


def call_together(
    function: str,
    calls: Sequence[Sequence[Any]],
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> list[Any]:
    """As :func:`call`, of several processes that run at once."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, function, json.dumps(arguments)],
            env=dict(os.environ if environment is None else environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in calls
    ]
    try:
        return [_result(process, limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes


def _result(process: subprocess.Popen[str], limit: float | None) -> Any:
    try:
        printed, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"reason": f"not finished in {limit} s"}
    if process.returncode == 0:
        return json.loads(printed.splitlines()[-1])
    if ended_by_memory(process.returncode, errors):
        return {"reason": OUT_OF_MEMORY}
    last = (errors.strip().splitlines() or [f"code {process.returncode}"])[-1]
    return {"reason": f"failed: {last[:300]}"}


def checked(result: Any, what: str) -> Any:
    """Return a result of :func:`call`; None where the memory did not suffice.

    Raises:
        ExperimentError: If the call gave nothing for another reason.
    """
    if "reason" not in result:
        return result
    if result["reason"] == OUT_OF_MEMORY:
        return None
    raise ExperimentError(f"{what}: {result['reason']}")


def main(argv: list[str]) -> int:
    """The child process."""
    module, _, name = argv[0].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(argv[1]))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

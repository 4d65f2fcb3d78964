"""Time and memory of training steps on a device, and what the report says beside the allocator.

``python -m experiments.check_steps --device cuda --out FILE.json``
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.errors import ExperimentError
from experiments.part import Save, run_part
from experiments.trial import Specification, run_trial

DATASETS = ("synthetic:ogbn-arxiv", "synthetic:reddit")
MODELS = ("gcn", "gat", "gcnii")
VARIANTS = ("stock", "lossless", "L1", "L1+blocks", "CB2")
_STEPS = 6
_BITS = 4

TARGET = 0.02
"""How far the report's bytes may be from the allocator's, as a share of the allocator's."""


def check(
    device: torch.device,
    save: Save,
    datasets: Sequence[str] = DATASETS,
    models: Sequence[str] = MODELS,
    variants: Sequence[str] = VARIANTS,
) -> list[str]:
    """Try all of them, a fresh process each; return a line for each trial that failed.

    A trial whose memory did not suffice has not failed. Saves after each trial what
    :func:`experiments.trial.measure` gave (None: did not fit) under data set, model and variant,
    but for the curve, and under ``bytes`` what :func:`account` says.
    """
    found: dict[str, Any] = {"bits": _BITS, "steps": _STEPS, "datasets": {}}
    failed = []
    for dataset in datasets:
        found["datasets"][dataset] = {}
        for model in models:
            results: dict[str, Any] = {}
            found["datasets"][dataset][model] = {"variants": results, "bytes": {}}
            for variant in variants:
                specification = Specification(
                    model, variant, dataset, device=str(device), bits=_BITS, steps=_STEPS
                )
                try:
                    result = run_trial(specification)
                    results[variant] = result and {k: v for k, v in result.items() if k != "curve"}
                except ExperimentError as error:
                    results[variant] = {"error": str(error)}
                    failed.append(f"{model} on {dataset}: {error}")
                found["datasets"][dataset][model]["bytes"] = account(results)
                save(found)
    return failed


def account(results: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Return by variant what the report ``told`` and the allocator ``held`` after forward.

    In bytes, with ``off``, the difference over what was held, and whether it is ``within`` the
    target. Stock has no report: what ``lossless`` says of it, its raw bytes, stands there. What was
    not measured is left out.
    """
    found = {}
    for variant, result in results.items():
        if result is None or result.get("held_bytes") is None:
            continue
        teller, key = (variant, "saved_bytes") if variant != "stock" else ("lossless", "raw_bytes")
        told = (results.get(teller) or {}).get(key)
        if told is None:
            continue
        held = result["held_bytes"]
        off = (told - held) / held
        found[variant] = {"told": told, "held": held, "off": off, "within": abs(off) <= TARGET}
    return found


def main(argv: list[str] | None = None) -> int:
    """Try; return the exit code as the main job does."""
    return run_part("check_steps", __doc__.splitlines()[0], check, argv)


if __name__ == "__main__":
    sys.exit(main())

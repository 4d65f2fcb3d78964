"""A model of the network: sent bytes and times for more parts than this machine can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BANDWIDTH = 10e9 / 8
"""Bytes per second of the model's network, each way and in each process: 10 Gbit/s."""

LATENCY = 50e-6
"""Seconds of an exchange in the model, in addition to those of its bytes."""

Rank = Mapping[str, Any]


def bytes_of_row(ranks: Sequence[Rank]) -> tuple[float, float]:
    """Return the bytes of a sent row in forward, and of a halo row's gradient in backward."""
    forward = sum(rank["forward_bytes"] for rank in ranks)
    backward = sum(rank["sent_bytes"] for rank in ranks) - forward
    rows = sum(rank["sends"] for rank in ranks), sum(rank["halo"] for rank in ranks)
    return forward / max(1, rows[0]), backward / max(1, rows[1])


def modelled(
    size: Mapping[str, Any], measured: Sequence[Rank], alone: Rank | None
) -> dict[str, Any]:
    """Return the cost of a step with more parts.

    Args:
        size: ``edges``, ``sends`` and ``halo`` of the parts.
        measured: The processes of a run with several parts, which gives the bytes of a row and the
            number of exchanges.
        alone: The process of a run with one part, which gives the time of the work; None: unknown.

    Returns:
        ``sent_bytes`` of the process that sends most; ``network_seconds`` by :data:`BANDWIDTH` and
        :data:`LATENCY`; and ``step_seconds``, these plus the time of one process times the largest
        part's share of the edges, None if that time is unknown.
    """
    forward, backward = bytes_of_row(measured)
    rows = zip(size["sends"], size["halo"], strict=True)
    sent = [sends * forward + halo * backward for sends, halo in rows]
    network = max(sent) / BANDWIDTH + measured[0]["exchanges"] * LATENCY
    step = None
    if alone is not None and alone.get("step_seconds") is not None:
        step = alone["step_seconds"] * max(size["edges"]) / sum(size["edges"]) + network
    return {"sent_bytes": max(sent), "network_seconds": network, "step_seconds": step}

"""What is known of the last step: the contexts of each method that was called, and the layers."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from gact_graph.api.followed import Followed
from gact_graph.api.report import Report
from gact_graph.capture.config import Config
from gact_graph.codecs.offload.swap import Swapping
from gact_graph.layers.blocks.layers import Blocks
from gact_graph.support.rows import LayerRow, Row
from gact_graph.support.warn import warn


class Step:
    """Collects the rows of one step, call by call.

    A step may call several methods that are followed. A second call of one of them starts another
    step.

    Attributes:
        layers: What became of each message passing layer; the layers write it themselves.
    """

    def __init__(self, config: Config) -> None:
        self.layers: dict[str, LayerRow] = {}
        self._rows: dict[str, list[Row]] = {}
        self._seconds: dict[str, float | None] = {}
        self._unmatched = set(config.pin) if config.quantize else set()

    def start(self, method: str) -> None:
        """A method starts."""
        if method in self._rows:
            self._rows.clear()
            self._seconds.clear()
            self.layers.clear()

    def end(self, method: str, rows: list[Row], seconds: float | None) -> None:
        """The method has ended, saved these contexts and taken this time, where that is known."""
        self._rows[method] = rows
        self._seconds[method] = seconds

    def report(
        self,
        blocks: Blocks | None,
        swapping: Swapping | None,
        spared_below: int | None,
    ) -> Report:
        """The report of the step so far; see :class:`gact_graph.Report`."""
        return Report(
            [row for rows in self._rows.values() for row in rows],
            layers=[*self.layers.values()],
            order_bytes=0 if blocks is None else blocks.orders.nbytes,
            order_seconds=0.0 if blocks is None else blocks.orders.seconds,
            swaps_from=None if swapping is None else swapping.least,
            spared_below=spared_below,
            forward_seconds=_sum([*self._seconds.values()]),
        )

    def with_measured(self, report: Report, followed: Mapping[str, Followed]) -> Report:
        """The report with the sensitivities that are known now."""
        for method, rows in self._rows.items():
            for row in rows:
                row.sensitivity = followed[method].scheme.sensitivity_of(row.slot)
        schemes = [one.scheme for one in followed.values()]
        adaptations = [one.adaptation for one in followed.values()]
        known: dict[str, Any] = {
            "gradient_error": _largest([scheme.gradient_error for scheme in schemes]),
            "variance_ratio": _largest([scheme.variance_ratio for scheme in schemes]),
            "measurements": sum(one.measurements for one in adaptations if one is not None),
        }
        if all(getattr(report, name) == value for name, value in known.items()):
            return report
        return dataclasses.replace(report, **known)

    def check_pins(self, rows: list[Row], complete: bool) -> None:
        """Warns once of patterns in ``pin`` that match no slot.

        Args:
            rows: Those of a call that was just compressed.
            complete: Whether each method that is followed was called by now.
        """
        for row in rows:
            self._unmatched -= {p for p in self._unmatched if fnmatch.fnmatchcase(row.slot, p)}
        if self._unmatched and rows and complete:
            patterns = ", ".join(sorted(map(repr, self._unmatched)))
            self._unmatched.clear()
            warn(
                f"Expected pin to match slots of the model (got {patterns}, which match none); "
                f"gact_graph.report(model) lists them, such as {rows[0].slot!r}."
            )


def _sum(found: list[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def _largest(found: list[float | None]) -> float | None:
    return max((value for value in found if value is not None), default=None)

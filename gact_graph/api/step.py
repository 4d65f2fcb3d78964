"""The results of the last training step: contexts of each tracked method, and layers."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from gact_graph.api.report import Report
from gact_graph.api.tracked import TrackedMethod
from gact_graph.capture.config import Config
from gact_graph.codecs.offload.swap import Swapping
from gact_graph.layers.blocks.layers import Blocks
from gact_graph.support.messages import warn
from gact_graph.support.rows import LayerRow, Row


class Step:
    """Collect the rows of one step over all its calls.

    A step may call several tracked methods; a second call of the same method starts another step.

    Args:
        config: The settings.

    Attributes:
        layers: The rows of message passing layers, which the layers add themselves.
    """

    def __init__(self, config: Config) -> None:
        self.layers: dict[str, LayerRow] = {}
        self._rows: dict[str, list[Row]] = {}
        self._seconds: dict[str, float | None] = {}
        self._unmatched = set(config.pin) if config.quantize else set()

    def start(self, method: str) -> None:
        """Start a call of a method."""
        if method in self._rows:
            self._rows.clear()
            self._seconds.clear()
            self.layers.clear()

    def end(self, method: str, rows: list[Row], seconds: float | None) -> None:
        """End a call of a method.

        Args:
            method: The full name of the method.
            rows: The contexts that it saved.
            seconds: The duration, if known.
        """
        self._rows[method] = rows
        self._seconds[method] = seconds

    def report(
        self, blocks: Blocks | None, swapping: Swapping | None, spared_below: int | None
    ) -> Report:
        """Return the report of the step so far; see :class:`gact_graph.Report`."""
        seconds = [value for value in self._seconds.values() if value is not None]
        return Report(
            [row for rows in self._rows.values() for row in rows],
            layers=[*self.layers.values()],
            order_bytes=0 if blocks is None else blocks.orders.nbytes,
            order_seconds=0.0 if blocks is None else blocks.orders.seconds,
            sum_bytes=0 if blocks is None else blocks.sums.nbytes,
            swaps_from=None if swapping is None else swapping.least,
            spared_below=spared_below,
            forward_seconds=sum(seconds) if len(seconds) == len(self._seconds) else None,
        )

    def with_measured(self, report: Report, methods: Mapping[str, TrackedMethod]) -> Report:
        """Return the report with the latest sensitivities and errors of the gradient."""
        for method, rows in self._rows.items():
            for row in rows:
                row.sensitivity = methods[method].scheme.sensitivity_of(row.slot)
        schemes = [method.scheme for method in methods.values()]
        adaptations = [method.adaptation for method in methods.values()]
        measured: dict[str, Any] = {
            "gradient_error": _largest(scheme.gradient_error for scheme in schemes),
            "variance_ratio": _largest(scheme.variance_ratio for scheme in schemes),
            "measurements": sum(a.measurements for a in adaptations if a is not None),
        }
        if all(getattr(report, name) == value for name, value in measured.items()):
            return report
        return dataclasses.replace(report, **measured)

    def check_pins(self, rows: list[Row], complete: bool) -> None:
        """Warn once of ``pin`` patterns that match no slot.

        Args:
            rows: The contexts of the last call.
            complete: Whether every tracked method has been called.
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


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)

"""The results of the last training step: contexts of each tracked method, and layers."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gact_graph.api.report import Report
from gact_graph.api.tracked import TrackedMethod
from gact_graph.capture.config import Config
from gact_graph.codecs.offload.swap import Swapping
from gact_graph.layers.blocks.layers import Blocks
from gact_graph.support.messages import warn
from gact_graph.support.rows import LayerRow, Row

_N = TypeVar("_N", int, float)


@dataclass(frozen=True)
class Ended:
    """A call of a tracked method that has ended.

    Attributes:
        rows: The contexts that it saved.
        seconds: The duration, if known.
        spared_below: The ``min_bytes`` because of which nothing was compressed, if so.
    """

    rows: list[Row]
    seconds: float | None
    spared_below: int | None


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
        self._calls: dict[str, Ended] = {}
        self._unmatched = set(config.pin) if config.quantize else set()

    def start(self, method: str) -> None:
        """Start a call of a method."""
        if method in self._calls:
            self._calls.clear()
            self.layers.clear()

    def end(self, method: str, call: Ended) -> None:
        """End a call of a method, which has this full name."""
        self._calls[method] = call

    def report(self, blocks: Blocks | None, swapping: Swapping | None) -> Report:
        """Return the report of the step so far; see :class:`gact_graph.Report`."""
        calls = self._calls.values()
        seconds = [call.seconds for call in calls if call.seconds is not None]
        return Report(
            [row for call in calls for row in call.rows],
            layers=[*self.layers.values()],
            order_bytes=0 if blocks is None else blocks.orders.nbytes,
            order_seconds=0.0 if blocks is None else blocks.orders.seconds,
            sum_bytes=0 if blocks is None else blocks.sums.nbytes,
            swaps_from=None if swapping is None else swapping.least,
            spared_below=_largest(call.spared_below for call in calls),
            forward_seconds=sum(seconds) if len(seconds) == len(calls) else None,
        )

    def with_measured(self, report: Report, methods: Mapping[str, TrackedMethod]) -> Report:
        """Return the report with the latest sensitivities and errors of the gradient."""
        for method, call in self._calls.items():
            for row in call.rows:
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


def _largest(values: Iterable[_N | None]) -> _N | None:
    return max((value for value in values if value is not None), default=None)

"""What a user holds: the numbers of the last compressed step, and the ways to see them."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from gact_graph.api.report import notebook, page, plot, table
from gact_graph.api.report.data import ReportData


@dataclass(frozen=True)
class Report(ReportData):
    """Where the memory of one forward went: print it, or take ``to_dict()`` or ``save(path)``.

    ``raw_bytes`` are the unique storages that stock autograd would keep for backward, without
    parameters, buffers and the inputs of forward; ``stored_bytes`` are those kept now, of which
    ``host_bytes`` lie in host memory until backward reads them.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON."""
        counts = ("raw_bytes", "stored_bytes", "host_bytes")
        keys = ("slot", "role", "codec", "bits", "sensitivity", *counts)
        return {
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "host_bytes": self.host_bytes,
            "rate": self.rate,
            "average_bits": self.average_bits,
            "variance_ratio": self.variance_ratio,
            "gradient_error": self.gradient_error,
            "measurements": self.measurements,
            "forward_seconds": self.forward_seconds,
            "peak_bytes": self.peak_bytes,
            "strategy": self.strategy,
            "halo_bytes": self.halo_bytes,
            "layers": [dataclasses.asdict(row) for row in self.layers],
            "order_bytes": self.order_bytes,
            "order_seconds": self.order_seconds,
            "spared_below": self.spared_below,
            "contexts": [
                {key: getattr(row, key) for key in keys} | {"shape": list(row.shape)}
                for row in self.contexts
            ],
        }

    def log(self, writer: Any, step: int | None = None) -> None:
        """Logs rate, stored MB (10^6 bytes), average bits, variance ratio and gradient error.

        The last two are left out until they have been measured.

        Args:
            writer: TensorBoard's ``SummaryWriter``, or whatever has ``add_scalar(name, value,
                step)``; or a callable that takes these three.
            step: The number of the step.

        Raises:
            TypeError: ``writer`` is neither.
        """
        add = getattr(writer, "add_scalar", writer)
        if not callable(add):
            raise TypeError(
                f"Expected a writer with add_scalar, or a callable (got {type(writer).__name__})"
            )
        scalars = {
            "rate": self.rate,
            "stored_mb": self.stored_bytes / 1e6,
            "average_bits": self.average_bits,
            "variance_ratio": self.variance_ratio,
            "gradient_error": self.gradient_error,
        }
        for name, value in scalars.items():
            if value is not None:
                add(f"gact_graph/{name}", value, step)

    def save(self, path: str | Path) -> None:
        """Writes one HTML page that needs no network: memory over the step, by layer, by slot.

        The page follows the reader's light or dark theme, and its table can be sorted. It holds
        plotly.js, about 5 MB.

        Args:
            path: Of the file, which ends in ``.html`` or ``.htm``; one that is there is replaced.

        Raises:
            ImportError: plotly is not installed.
            ValueError: No forward was compressed yet, or ``path`` has another ending.
            FileNotFoundError: The folder of ``path`` does not exist.
        """
        page.save(self, path)

    def plot(self, path: str | Path) -> None:
        """Writes a bar chart of raw and stored bytes by slot; the suffix tells the format.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: No forward was compressed yet.
        """
        plot.plot(self, path)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue().rstrip("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from table.render(self, options.max_width)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return notebook.render(self)

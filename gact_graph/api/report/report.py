"""The numbers of the last compressed step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from gact_graph.api.report import figures, page
from gact_graph.api.report.contexts import Contexts
from gact_graph.api.report.curves import curves_of
from gact_graph.api.report.names import counted, format_bytes, label_of
from gact_graph.api.report.table import sheet_of
from gact_graph.support.rows import LayerRow

_NUMBERS = (
    *("raw_bytes", "stored_bytes", "host_bytes", "rate", "average_bits", "variance_ratio"),
    *(
        "gradient_error",
        "measurements",
        "forward_seconds",
        "peak_bytes",
        "strategy",
        "planned_bytes",
        "measured_bytes",
        "planned_seconds",
        "measured_seconds",
    ),
    *("halo_bytes", "order_bytes", "order_seconds", "sum_bytes", "spared_below"),
)
_OF_CONTEXTS = (
    *("slot", "role", "codec", "bits", "sensitivity", "raw_bytes", "stored_bytes", "host_bytes"),
)


@dataclass(frozen=True)
class Report(Contexts):
    """The memory of one forward: print the report, or call ``to_dict()`` or ``save(path)``.

    ``raw_bytes`` are the unique storages that stock autograd would keep for backward, without
    parameters, buffers and the inputs of forward; ``stored_bytes`` are those that are kept, of
    which ``host_bytes`` stay in host memory, or on a CPU in files, until backward reads them.

    Attributes:
        contexts: The saved tensors.
        empty: Whether no forward was compressed yet.
        variance_ratio: Expected squared error of the gradient from compression, relative to the
            squared gradient; None before the first measurement.
        gradient_error: Last measured error of the gradient, relative to its length, with the bits
            at that time; None before the first measurement.
        measurements: Number of measured steps since the model was wrapped.
        layers: Message passing layers; empty without blocks and recomputation.
        order_bytes: Bytes of the sorted edges of the graphs in use.
        order_seconds: Time to sort edges, and to look up sorted edges, since the model was wrapped.
        sum_bytes: Bytes of sums over neighbors that are kept from one step to the next, since their
            rows and weights are constant.
        swaps_from: Bytes from which an encoded context leaves the device; None without swapping.
        spared_below: The ``min_bytes`` below which contexts stayed uncompressed; None if all were
            encoded.
        strategy: Choice of a memory budget, such as ``"stock"`` or ``"L1, 4 bits"``; None without a
            budget, and before it has chosen.
        planned_bytes: The peak that the plan of the memory budget expects, of the bytes that
            training adds; None without a budget.
        measured_bytes: The largest peak of a step that was measured, likewise; None if unknown.
        planned_seconds: The time of a step that the plan expects, roughly; None without a plan.
        measured_seconds: The least time from the start of forward to the end of backward, for a
            graph of the planned size; None without a plan.
        halo_bytes: Bytes that this process has sent to others since the start of the last forward:
            rows of nodes and, after backward, their gradients; None for a graph in one part.
        forward_seconds: Time of the forwards of the last step, including saving; None on CUDA,
            whose kernels are still running when forward returns.
        peak_bytes: Peak memory until the report was created: the resident set of the process, or
            the maximum of CUDA's allocator; None where the system does not report it.
        by: The rows of the table: ``"slot"`` or ``"layer"``.
    """

    empty: bool = False
    variance_ratio: float | None = None
    gradient_error: float | None = None
    measurements: int = 0
    layers: list[LayerRow] = field(default_factory=list)
    order_bytes: int = 0
    order_seconds: float = 0.0
    sum_bytes: int = 0
    swaps_from: int | None = None
    spared_below: int | None = None
    strategy: str | None = None
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    planned_seconds: float | None = None
    measured_seconds: float | None = None
    halo_bytes: int | None = None
    forward_seconds: float | None = None
    peak_bytes: int | None = None
    by: str = "slot"

    def __post_init__(self) -> None:
        if self.by not in ("slot", "layer"):
            raise ValueError(f"Expected by to be 'slot' or 'layer' (got {self.by!r})")

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, ready for JSON."""
        return {
            **{key: getattr(self, key) for key in _NUMBERS},
            "layers": [dataclasses.asdict(row) for row in self.layers],
            "contexts": [
                {key: getattr(row, key) for key in _OF_CONTEXTS} | {"shape": list(row.shape)}
                for row in self.contexts
            ],
        }

    def log(self, writer: Any, step: int | None = None) -> None:
        """Log rate, stored MB (10^6 bytes), average bits, variance ratio and gradient error.

        Values that are not known yet are left out.

        Args:
            writer: TensorBoard's ``SummaryWriter``, any object with ``add_scalar(name, value,
                step)``, or a callable with these arguments.
            step: The number of the step.

        Raises:
            TypeError: ``writer`` is none of these.
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
        """Write a single HTML page that needs no network: memory by time, by layer and by slot.

        The page follows the reader's light or dark theme, and its table can be sorted. It contains
        plotly.js, about 5 MB.

        Args:
            path: The file, which ends in ``.html`` or ``.htm``; an existing file is replaced.

        Raises:
            ImportError: plotly is not installed.
            ValueError: No forward was compressed yet, or ``path`` has another ending.
            FileNotFoundError: The folder of ``path`` does not exist.
        """
        page.check_ending(path, "; for an image call report.plot")
        self._check_not_empty()
        page.write(path, page.render(self))

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart of raw and stored bytes by slot; the suffix selects the format.

        Raises:
            ImportError: matplotlib is not installed.
            FileNotFoundError: The folder does not exist.
            ValueError: No forward was compressed yet, or matplotlib does not know the suffix.
        """
        self._check_not_empty()
        page.check_folder(path)
        figures.bar_chart(self, path)

    def __str__(self) -> str:
        return sheet_of(self).as_text(120)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from sheet_of(self).render(options)

    def _repr_html_(self) -> str:
        """Return the table for a notebook, and the bytes that autograd holds over the step."""
        curves = curves_of(self) if self.contexts else []
        return page.render_sheet(dataclasses.replace(sheet_of(self), curves=curves))

    @property
    def why_empty(self) -> str:
        """The reason why the report is empty."""
        if self.strategy == "stock":
            return "The model trains without compression, which fits the memory budget."
        return (
            "No forward was compressed yet: call the model once in training mode with gradients "
            "enabled."
        )

    def _check_not_empty(self) -> None:
        if not self.contexts:
            raise ValueError(f"Expected a report with contexts (got none). {self.why_empty}")

    @property
    def headline(self) -> str:
        """Raw and stored bytes in one line."""
        rate = "" if self.rate is None else f" ({self.rate:.1f}x less)"
        return f"{format_bytes(self.raw_bytes)} -> {format_bytes(self.stored_bytes)}{rate}"

    @property
    def baseline(self) -> str:
        """The title of raw bytes: ``stock``, or ``raw`` if they are unknown in some layers."""
        return "raw" if self.not_counted else "stock"

    @property
    def not_counted(self) -> list[str]:
        """The layers in which stock autograd would save more than the raw bytes."""
        names = (row.slot.partition("/")[0] for row in self.layers if not row.counted)
        return [*dict.fromkeys(names)]

    @property
    def costs(self) -> dict[str, str]:
        """Time, peak memory and gradient error by name, as far as they are known."""
        costs = {}
        if self.forward_seconds is not None:
            costs["last forward"] = f"{self.forward_seconds:.3g} s"
        if self.peak_bytes is not None:
            costs["peak memory"] = format_bytes(self.peak_bytes)
        if self.gradient_error is not None:
            costs["error of the gradient"] = f"{100 * self.gradient_error:.1f} %"
        return costs

    @property
    def remarks(self) -> Iterator[str]:
        """Sentences for the lines below the table."""
        if any(row.stored_bytes and not row.raw_bytes for row in self.contexts):
            yield (
                "a row with 0 B raw shares its storage with another row, or other tensors are "
                "restored from it"
            )
        if self.strategy is not None:
            planned = ""
            if self.planned_bytes is not None:
                planned = f"; planned peak {format_bytes(self.planned_bytes)}"
            if self.measured_bytes is not None:
                planned += f", measured {format_bytes(self.measured_bytes)}"
            if self.planned_seconds is not None:
                planned += f"; planned step {self.planned_seconds:.2g} s"
            if self.measured_seconds is not None:
                planned += f", measured {self.measured_seconds:.2g} s"
            yield f"chosen for the memory budget: {self.strategy}{planned}"
        if self.spared_below is not None:
            yield (
                f"contexts stay uncompressed until {format_bytes(self.spared_below)} are saved: "
                "encoding fewer bytes takes more time than it is worth; min_bytes=0 encodes all"
            )
        if self.halo_bytes is not None:
            yield f"{format_bytes(self.halo_bytes)} sent to other processes since forward started"
        if self.host_bytes:
            rest = format_bytes(self.stored_bytes - self.host_bytes)
            waiting = format_bytes(self.host_bytes)
            yield f"{waiting} wait in host memory, or on a CPU in files, {rest} on the device"
        elif self.swaps_from is not None:
            least = format_bytes(self.swaps_from)
            yield f"L2 equals L1 here: no context takes {least} or more after encoding"
        blocks = [row.blocks for row in self.layers if row.blocks is not None]
        if blocks:
            sorting = ""
            if self.order_bytes:
                size = format_bytes(self.order_bytes)
                sorting = f"; sorting edges took {self.order_seconds:.2f} s so far, {size}"
            calls = counted(len(blocks), "call")
            yield f"{calls} of message passing in {counted(sum(blocks), 'block')}{sorting}"
        if self.sum_bytes:
            yield f"{format_bytes(self.sum_bytes)} of sums over neighbors kept for the next step"
        if self.not_counted:
            yield (
                "raw bytes exclude the tensors that stock PyTorch would save inside "
                f"{', '.join(map(label_of, self.not_counted))}: their size is unknown"
            )
        for row in self.layers:
            if row.way == "stock":
                yield f"{row.slot} runs as in PyG: it {row.reason}"

"""What is known of the last compressed step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gact_graph.api.report.contexts import Contexts
from gact_graph.api.report.layers import label_of
from gact_graph.api.report.units import format_bytes
from gact_graph.support.rows import LayerRow

NOTHING_YET = (
    "No forward was compressed yet: call the model once in training mode with gradients enabled."
)

_BY = ("slot", "layer")


@dataclass(frozen=True)
class ReportData(Contexts):
    """The numbers of a report; ``gact_graph.Report`` shows them."""

    empty: bool = False
    variance_ratio: float | None = None
    """The squared error that compression is expected to add to the gradient, over the squared
    gradient; None before it was measured."""
    gradient_error: float | None = None
    """How far the gradient was off when it was last measured, over its length, with the bits of
    then; None before that."""
    measurements: int = 0
    """How many steps were measured since the model was wrapped."""

    layers: list[LayerRow] = field(default_factory=list)
    """Message passing layers; empty where neither blocks nor recomputing was asked for."""
    order_bytes: int = 0
    """What the sorted edges of the graphs in use take."""
    order_seconds: float = 0.0
    """Spent on sorting edges, and on finding those sorted before, since the model was wrapped."""
    swaps_from: int | None = None
    """Bytes from which on an encoded context leaves a CUDA device; None where none is to leave."""

    spared_below: int | None = None
    """The ``min_bytes`` below which contexts were kept as they are; None where all were coded."""

    strategy: str | None = None
    """The choice of a memory budget, such as ``"stock"`` or ``"L1, 4 bits"``; None without a
    budget, and before the first training call."""

    halo_bytes: int | None = None
    """What this process has sent to others since the last forward began: rows of nodes, and their
    gradients once backward has run; None where the graph is not cut into parts."""

    forward_seconds: float | None = None
    """What the forwards of the last step took, saving included; None on CUDA, whose kernels run on
    after forward has returned."""
    peak_bytes: int | None = None
    """The most memory that was held until the report was made: the resident set of the process, or
    what CUDA's allocator had handed out; None where the system does not tell."""

    by: str = "slot"
    """What has a row in the table: ``"slot"`` or ``"layer"``."""

    def __post_init__(self) -> None:
        if self.by not in _BY:
            raise ValueError(f"Expected by to be 'slot' or 'layer' (got {self.by!r})")

    @property
    def why_empty(self) -> str:
        """Why there is nothing to show, where the report is empty."""
        if self.strategy == "stock":
            return "The model trains as it is: that fits the memory that was given."
        return NOTHING_YET

    @property
    def headline(self) -> str:
        """Raw and stored bytes in a line."""
        rate = "" if self.rate is None else f" ({self.rate:.1f}x less)"
        return f"{format_bytes(self.raw_bytes)} -> {format_bytes(self.stored_bytes)}{rate}"

    @property
    def baseline(self) -> str:
        """What raw bytes are those of: ``stock``, or ``raw`` where a part of it is not known."""
        return "raw" if self.not_counted else "stock"

    @property
    def not_counted(self) -> list[str]:
        """The layers in which stock autograd would save more than raw bytes tell."""
        names = (row.slot.partition("/")[0] for row in self.layers if not row.counted)
        return [*dict.fromkeys(names)]

    @property
    def costs(self) -> dict[str, str]:
        """What is known of time, peak and gradient, by name and as text."""
        found = {}
        if self.forward_seconds is not None:
            found["last forward"] = f"{self.forward_seconds:.3g} s"
        if self.peak_bytes is not None:
            found["peak memory"] = format_bytes(self.peak_bytes)
        if self.gradient_error is not None:
            found["error of the gradient"] = f"{100 * self.gradient_error:.1f} %"
        return found

    @property
    def remarks(self) -> Iterator[str]:
        """What a reader should know beside the bytes of contexts, in plain sentences."""
        if any(row.stored_bytes and not row.raw_bytes for row in self.contexts):
            yield (
                "where stock PyTorch holds 0 B (raw), another row counts the same storage, or the "
                "tensor is stored because others are rebuilt from it"
            )
        if self.strategy is not None:
            yield f"chosen for the memory that was given: {self.strategy}"
        if self.spared_below is not None:
            yield (
                f"contexts are kept as they are until {format_bytes(self.spared_below)} are saved, "
                "for coding them takes longer than that is worth: min_bytes=0 codes all"
            )
        if self.halo_bytes is not None:
            yield f"{format_bytes(self.halo_bytes)} were sent to other processes since it began"
        if self.host_bytes:
            stays = format_bytes(self.stored_bytes - self.host_bytes)
            yield f"{format_bytes(self.host_bytes)} lie in host memory, {stays} stay on the device"
        elif self.swaps_from is not None:
            yield (
                "L2 equals L1 here: no context on a CUDA device takes "
                f"{format_bytes(self.swaps_from)} or more once it is encoded"
            )
        cut = [row.blocks for row in self.layers if row.blocks is not None]
        if cut:
            yield (
                f"{len(cut)} calls of message passing in {sum(cut)} blocks; edges sorted in "
                f"{self.order_seconds:.2f} s so far, {format_bytes(self.order_bytes)}"
            )
        if self.not_counted:
            yield (
                f"raw bytes are without what stock PyTorch would keep inside "
                f"{', '.join(map(label_of, self.not_counted))}: that is not known"
            )
        for row in self.layers:
            if row.way == "stock":
                yield f"{row.slot} runs as PyG has it: it {row.reason}"

    def check_not_empty(self) -> None:
        """Raises ValueError where there is nothing to draw."""
        if not self.contexts:
            raise ValueError(f"Expected a report with contexts (got none). {self.why_empty}")

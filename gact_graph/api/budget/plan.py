"""The plan of a training step: the form of each saved tensor, and the memory over the step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from torch import nn
from torch.nn.parameter import is_lazy

from gact_graph.adaptive.state_checks import check_count, check_keys
from gact_graph.api.budget.estimate import Estimate, Line, Peak, Strategy
from gact_graph.api.budget.plan_sheet import draw, sheet_of
from gact_graph.api.budget.planned_tensor import PlannedTensor
from gact_graph.api.report import format_bytes, page
from gact_graph.capture.places import Places

_FORMAT = 1
"""The version of the JSON format."""


class MemoryBudgetError(RuntimeError):
    """No strategy fits the memory passed to ``gact_graph.wrap`` or ``gact_graph.plan``.

    Or a limit of the process, such as ``ulimit -v``, is below that memory.
    """


@dataclass(frozen=True)
class Plan:
    """The form of each saved tensor under a memory budget: print it, or pass it to ``wrap``.

    A peak is defined as for :class:`gact_graph.Estimate`. Make a plan by :func:`gact_graph.plan`.

    Attributes:
        strategy: The choices.
        memory: The budget in bytes.
        nodes: The number of nodes of all types.
        edges: The number of edges of all types.
        error: Expected squared error of the gradient, relative to its square; 0 if all is exact.
        seconds: The time of a step on the machine that made the plan, roughly: extrapolated from
            trials on parts of the graph.
        tensors: The saved tensors, in the order of forward.
        peaks: The planned peak of each part of the first steps in order, by the size of the graph:
            the first step may measure sensitivities, the next does not.
        stock_peaks: The same of stock PyG.
        standing: Bytes that any strategy takes: the state of the optimizer, libraries.
        places: The operations whose results need no memory of their own.
        model: The shape of each parameter, by name.
    """

    strategy: Strategy
    memory: int
    nodes: int
    edges: int
    error: float
    seconds: float
    tensors: Sequence[PlannedTensor]
    peaks: Sequence[Peak]
    stock_peaks: Sequence[Peak]
    standing: int
    places: Places
    model: Mapping[str, Sequence[int]]

    @property
    def curve(self) -> list[int]:
        """The planned peak of each part of a step in bytes, in order: the most of all steps."""
        return [*self.step(self.peaks).values()]

    @property
    def stock_curve(self) -> list[int]:
        """The same of stock PyG."""
        return [*self.step(self.stock_peaks).values()]

    def step(self, peaks: Sequence[Peak]) -> dict[tuple[str, bool], int]:
        """Return the bytes of each part of a step, by its tensor and whether it is released.

        Args:
            peaks: :attr:`peaks` or :attr:`stock_peaks`.
        """
        step: dict[tuple[str, bool], int] = {}
        for slot, released, line in peaks:
            size = self.standing + round(line.at(1.0))
            step[slot, released] = max(size, step.get((slot, released), 0))
        return step

    @property
    def peak_bytes(self) -> int:
        """The planned peak of a step."""
        return max(self.curve)

    @property
    def stock_bytes(self) -> int:
        """The peak of a step of stock PyG."""
        return max(self.stock_curve)

    def under(self, part: str) -> Plan:
        """Return the plan for a whole model, of which a part was planned.

        Args:
            part: The full name of the part; empty for the whole model.
        """
        if not part:
            return self

        def name(slot: str) -> str:
            return f"{part}/{slot}"

        tensors = [replace(tensor, slot=name(tensor.slot)) for tensor in self.tensors]
        strategy, places = self.strategy.renamed(name), self.places.renamed(name)
        return replace(self, strategy=strategy, tensors=tensors, places=places)

    def grown_to(self, nodes: int, edges: int) -> Plan:
        """Return the plan for a graph with a similar number of edges per node, if it is larger.

        Args:
            nodes: The number of nodes.
            edges: The number of edges.
        """
        share = max(nodes / max(1, self.nodes), edges / max(1, self.edges))
        if share <= 1:
            return self

        def grown(peaks: Sequence[Peak]) -> list[Peak]:
            return [
                peak._replace(line=Line(peak.line.fixed, peak.line.growing * share))
                for peak in peaks
            ]

        return replace(
            self,
            nodes=max(nodes, round(self.nodes * share)),
            edges=max(edges, round(self.edges * share)),
            seconds=self.seconds * share,
            peaks=grown(self.peaks),
            stock_peaks=grown(self.stock_peaks),
        )

    def fits(self, memory: int) -> bool:
        """Return whether the peak fits a budget in bytes, with a margin for its error."""
        return Estimate.budget_for(self.peak_bytes) <= memory

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **own,
            "format": _FORMAT,
            "strategy": self.strategy.to_dict(),
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "peaks": [[slot, released, *line] for slot, released, line in self.peaks],
            "stock_peaks": [[slot, released, *line] for slot, released, line in self.stock_peaks],
            "places": self.places.to_dict(),
            "model": {name: [*shape] for name, shape in self.model.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan of :meth:`to_dict`.

        Raises:
            TypeError: If ``values`` is no mapping, or has no ints for its sizes.
            ValueError: If a key is missing or unknown, an entry has another form, or the format is
                that of another version.
        """
        names = [field.name for field in fields(cls)]
        check_keys("plan", values, ("format", *names), source="Plan.to_dict")
        if values["format"] != _FORMAT:
            raise ValueError(
                f"Expected a plan of format {_FORMAT} (got {values['format']!r}); make the plan "
                "again with gact_graph.plan"
            )
        for name in ("memory", "nodes", "edges", "standing"):
            check_count(f"plan[{name!r}]", values[name])
        try:
            own = {
                "strategy": Strategy.from_dict(values["strategy"]),
                "tensors": [PlannedTensor(**tensor) for tensor in values["tensors"]],
                **{
                    name: [Peak(slot, released, Line(*line)) for slot, released, *line in peaks]
                    for name in ("peaks", "stock_peaks")
                    for peaks in [values[name]]
                },
                "places": Places.from_dict(values["places"]),
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected the entries of a plan (got {type(error).__name__}: {error}); make the "
                "plan again with gact_graph.plan"
            ) from error
        return cls(**{name: values[name] for name in names} | own)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, a page, or a picture of the memory over the step, by the suffix.

        Args:
            path: A file that ends in ``.json`` or ``.html``, or in a suffix of matplotlib, such as
                ``.png``.

        Raises:
            ImportError: If matplotlib is not installed, for a picture.
            FileNotFoundError: If the folder does not exist.
            ValueError: If matplotlib does not know the suffix.
        """
        path = Path(path)
        page.check_folder(path)
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        elif path.suffix.lower() in page.ENDINGS:
            page.write(path, page.render_sheet(sheet_of(self), "sheet.html"))
        else:
            draw(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote as JSON.

        Raises:
            TypeError: If the file has JSON other than an object.
            ValueError: If the file has no JSON, or is not a plan.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"Expected a plan as JSON in {str(path)!r} (got {error})") from None
        return cls.from_dict(values)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless the plan was made for a model with these parameters.

        Args:
            model: The model.
        """
        shapes, planned = shapes_of(model), {name: [*s] for name, s in self.model.items()}
        if shapes == planned:
            return
        name = next(n for n in {**planned, **shapes} if planned.get(n) != shapes.get(n))
        raise ValueError(
            f"Expected the model that the plan was made for, with {name!r} of shape "
            f"{planned.get(name)} (got {shapes.get(name)}); make a plan for this model with "
            "gact_graph.plan"
        )

    @property
    def headline(self) -> str:
        """The peaks in one line."""
        return (
            f"{self.nodes:,} nodes, {self.edges:,} edges: {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.memory)}, stock {format_bytes(self.stock_bytes)}"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from sheet_of(self).render(options)

    def _repr_html_(self) -> str:
        """Return the table for a notebook, and the memory over the step beside that of stock."""
        return page.render_sheet(sheet_of(self))

    def __str__(self) -> str:
        return sheet_of(self).as_text(100)

    __repr__ = __str__


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Return the shape of each parameter, by name; empty if its first forward decides it."""
    return {
        name: [] if is_lazy(parameter) else [*parameter.shape]
        for name, parameter in model.named_parameters()
    }

"""How what a step takes grows with the graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Something that grows with the graph: ``fixed + growing * share`` for a share of it."""

    fixed: float
    growing: float

    @classmethod
    def through(cls, low: float, at_low: float, high: float, at_high: float) -> Line:
        """The line through two points; nothing shrinks where the graph grows."""
        growing = max(0.0, (at_high - at_low) / (high - low)) if high > low else at_high / high
        return cls(max(0.0, at_high - growing * high), growing)

    def at(self, share: float) -> float:
        return self.fixed + self.growing * share

    def mixed(self, other: Line, weight: float) -> Line:
        """Between this line and another."""
        return Line(
            self.fixed + weight * (other.fixed - self.fixed),
            self.growing + weight * (other.growing - self.growing),
        )


@dataclass(frozen=True)
class Highest:
    """The highest of some lines: the step that takes most of a small graph is not always the one
    that takes most of a large graph."""

    lines: tuple[Line, ...]

    def at(self, share: float) -> float:
        return max(line.at(share) for line in self.lines)

    def mixed(self, other: Highest, weight: float) -> Highest:
        """Between this and another one with as many lines."""
        pairs = zip(self.lines, other.lines, strict=True)
        return Highest(tuple(line.mixed(more, weight) for line, more in pairs))


@dataclass(frozen=True)
class Growth:
    """What one way takes, by the share of the graph."""

    peak: Highest
    saved: Line
    seconds: Line

    def mixed(self, other: Growth, weight: float) -> Growth:
        """Between this one and another, as four bits are between two and eight."""
        return Growth(
            self.peak.mixed(other.peak, weight),
            self.saved.mixed(other.saved, weight),
            self.seconds.mixed(other.seconds, weight),
        )

"""The memory of a training step as a function of the choice for each saved tensor.

A trial records the peak of each part of a step, from one save or release of a context to the next
(``capture.moments``), once with all tensors exact and once with all of them in codes. Their peaks
are linear in the size of the graph, and so is the size of each context. A part of a step that saves
some tensors exactly and others in codes takes the contexts that are alive in it, in their chosen
forms, and the temporary memory of the recorded part that chose alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gact_graph.api.budget.estimate import Line
from gact_graph.capture.moments import Moments
from gact_graph.support.rows import Row

EXACT = 32
"""The width of a tensor that is not quantized."""


class Form(NamedTuple):
    """A form of saved tensors.

    Attributes:
        bits: Bits per element; :data:`EXACT` without codes.
        offloaded: Whether they wait for backward off the device.
    """

    bits: float
    offloaded: bool = False


@dataclass(frozen=True)
class Timeline:
    """A recorded step, on a share of the graph.

    Attributes:
        moments: The saved or released context and the peak in bytes of each part, in order.
        stored: The bytes of each context.
        coded: The number of quantized elements of each context; 0 for other codecs.
        sources: The contexts from which each context is computed again.
    """

    moments: Sequence[tuple[str, bool, float]]
    stored: Mapping[str, float]
    coded: Mapping[str, float]
    sources: Mapping[str, Sequence[str]]

    @classmethod
    def of(
        cls, low: Moments, high: Moments, shares: tuple[float, float], share: float = 1.0
    ) -> Timeline:
        """Extrapolate two records.

        Args:
            low: The record of the smaller part.
            high: The record of the larger part. If its steps are other ones, it alone counts.
            shares: These parts, as shares of the graph.
            share: The share to extrapolate to.
        """
        if not alike(low, high):
            low, shares = high, (shares[1], shares[1])
        peaks = [
            (b.slot, b.released, Line.through(a.peak, b.peak, shares).at(share))
            for a, b in zip(low.moments, high.moments, strict=True)
        ]
        stored, coded = (
            {
                name: Line.through(get(low.rows[name]), get(row), shares).at(share)
                for name, row in high.rows.items()
            }
            for get in (lambda row: row.stored_bytes, _coded)
        )
        return cls(peaks, stored, coded, high.sources)

    def alive(self) -> Iterator[frozenset[str]]:
        """Yield the contexts that are alive in each part."""
        now: set[str] = set()
        for name, released, _ in self.moments:
            yield frozenset(now)
            if released:
                now.discard(name)
            else:
                now.add(name)

    def temporary(self) -> dict[tuple[str, bool], float]:
        """Return the bytes of each part besides contexts, by its end."""
        return {
            (name, released): peak - sum(self.stored.get(other, 0.0) for other in alive)
            for (name, released, peak), alive in zip(self.moments, self.alive(), strict=True)
        }


@dataclass(frozen=True)
class MemoryModel:
    """The peak of each part of the steps, linear in the choices.

    Attributes:
        units: The modules whose contexts have a choice, which all of them share.
        forms: The forms that each unit may have; the last is exact, on the device.
        fixed: Bytes of each part that no choice changes, [parts].
        chosen: Bytes that each choice adds to each part, [parts, units, forms].
        measures: Whether each part belongs to the step that measures sensitivities, [parts].
        ends: The context at the end of each part, and whether it is released there.
        needs: Pairs of units: exact tensors of the first are computed again from those of the
            second, if these are exact, too.
    """

    units: tuple[str, ...]
    forms: tuple[Form, ...]
    fixed: NDArray[np.float64]
    chosen: NDArray[np.float64]
    measures: NDArray[np.bool_]
    ends: Sequence[tuple[str, bool]]
    needs: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls,
        exact: Sequence[Timeline],
        coded: Sequence[Timeline],
        base: float,
        forms: Sequence[Form],
        least: float = 0.0,
    ) -> MemoryModel:
        """Return the model of two steps: the first, which measures sensitivities, and the next.

        Args:
            exact: The steps without codes.
            coded: The steps in which all tensors are quantized that can be.
            base: Their bits.
            forms: The forms to choose from; the last is exact, on the device.
            least: The least bytes of a tensor that is offloaded.
        """
        names = sorted({name for step in coded for name, count in step.coded.items() if count})
        units = tuple(dict.fromkeys(map(unit_of, names)))
        place = {unit: index for index, unit in enumerate(units)}
        bits = np.array([form.bits for form in forms])
        away = np.array([form.offloaded for form in forms])
        is_exact = bits == EXACT
        fixed: list[float] = []
        chosen: list[NDArray[np.float64]] = []
        measures: list[bool] = []
        ends: list[tuple[str, bool]] = []
        for number, (without, step) in enumerate(zip(exact, coded, strict=True)):
            of_exact = without.temporary()
            parts = zip(step.moments, step.alive(), _owners(step, place), strict=True)
            temporary = step.temporary()
            for (name, released, _), alive, owner in parts:
                part, constant, fetched = np.zeros((len(units), len(forms))), 0.0, 0.0
                for other in alive:
                    stored = step.stored.get(other, 0.0)
                    unit = place.get(unit_of(other))
                    if unit is None:
                        constant += stored
                        continue
                    elements = step.coded.get(other, 0.0)
                    exactly = without.stored.get(other, stored)
                    held = np.where(is_exact, exactly, stored + (bits - base) * elements / 8)
                    part[unit] += np.where(away & (elements > 0) & (held >= least), 0.0, held)
                    fetched += exactly if unit == owner else 0.0
                own = temporary[name, released]
                if owner is None:
                    constant += own
                else:
                    exactly = of_exact.get((name, released), own)
                    held = np.where(is_exact, exactly, own)
                    # A part that decodes codes by rows fetches an offloaded tensor whole.
                    part[owner] += np.where(away, max(own, exactly + fetched), held)
                fixed.append(constant)
                chosen.append(part)
                measures.append(number == 0)
                ends.append((name, released))
        shape = (len(fixed), len(units), len(forms))
        every = np.array(chosen).reshape(shape)
        which = np.array(measures, dtype=bool)
        return cls(
            units, tuple(forms), np.array(fixed), every, which, ends, _needs(exact, {*names}, place)
        )

    def steady(self) -> MemoryModel:
        """Return the model of the step that measures nothing."""
        parts = ~self.measures
        return replace(
            self,
            fixed=self.fixed[parts],
            chosen=self.chosen[parts],
            measures=self.measures[parts],
            ends=[end for end, part in zip(self.ends, parts, strict=True) if part],
        )

    def allows(self, choices: Sequence[int]) -> bool:
        """Return whether the sources of all exact tensors are exact."""
        is_exact = [self.forms[choice].bits == EXACT for choice in choices]
        return all(is_exact[source] or not is_exact[unit] for unit, source in self.needs)

    def curve(self, choices: Sequence[int]) -> NDArray[np.float64]:
        """Return the peak of each part in bytes, [parts].

        Args:
            choices: The index of each unit's form.
        """
        units = np.arange(len(self.units))
        of_units = self.chosen[:, units, np.asarray(choices, dtype=int)]
        return np.asarray(self.fixed + of_units.sum(axis=1))

    def peak(self, choices: Sequence[int]) -> float:
        """Return the peak of the steps in bytes."""
        return float(self.curve(choices).max(initial=0.0))


def alike(low: Moments, high: Moments) -> bool:
    """Return whether two records have the same parts and contexts."""
    names = ([(moment.slot, moment.released) for moment in m.moments] for m in (low, high))
    return next(names) == next(names) and low.rows.keys() == high.rows.keys()


def unit_of(name: str) -> str:
    """Return the module of a slot: its contexts are computed from each other."""
    return name.rpartition("/")[0]


def _needs(
    exact: Sequence[Timeline], names: set[str], place: Mapping[str, int]
) -> list[tuple[int, int]]:
    """Return the pairs of :attr:`MemoryModel.needs`.

    Args:
        exact: The steps without codes.
        names: The contexts that have a choice.
        place: The indices of their units.
    """

    def sources_of(name: str, step: Timeline) -> Iterator[str]:
        for source in step.sources.get(name, ()):
            yield from [source] if source in names else sources_of(source, step)

    pairs = {
        (place[unit_of(name)], place[unit_of(source)])
        for step in exact
        for name in names
        for source in sources_of(name, step)
    }
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def _owners(step: Timeline, place: Mapping[str, int]) -> list[int | None]:
    """Return the unit whose choice decides the temporary memory of each part.

    In forward it is the unit of the context that was saved last, in backward of that which is
    released next: contexts without a choice, such as masks, lie between.
    """
    own = [place.get(unit_of(name)) for name, *_ in step.moments]
    last: int | None = None
    for index, (_, released, _) in enumerate(step.moments):
        if not released:
            own[index] = last = own[index] if own[index] is not None else last
    following: int | None = None
    for index in reversed(range(len(own))):
        if step.moments[index][1]:
            own[index] = following = own[index] if own[index] is not None else following
    return own


def _coded(row: Row) -> float:
    return row.numel if row.bits is not None else 0

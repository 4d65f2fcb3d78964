"""When sensitivities are measured: as soon as possible, and again at each interval."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn

from gact_graph.adaptive.agreement import Agreement, agreement_of, data_parallel
from gact_graph.adaptive.row_weights import RowWeights
from gact_graph.adaptive.scheme import Scheme
from gact_graph.adaptive.sensitivity import Measured, Measurement, Outcome
from gact_graph.adaptive.state_checks import (
    check_by_slot,
    check_count,
    check_flag,
    check_keys,
    check_names,
)
from gact_graph.support.messages import warn
from gact_graph.support.sharded import is_sharded

_ENOUGH = 3
"""Failures in a row after which nothing is measured until other parameters require gradients."""

_REMEMBERED = 8
"""The number of sets of trained parameters whose bits are remembered."""

ALARM = 0.5
"""The share of the gradient's mean square above which the variance that compression adds causes a
warning: it is then more than the gradient and all its other variance together."""

_PATIENCE = 8
"""Forwards after which a measured forward without a backward no longer delays the next one."""

_EARLY = 32
"""A forward that is measured before the first interval ends, since sensitivities change fast at the
beginning of training."""


@dataclass
class _Progress:
    """The results of the last attempts to measure, which decide the next one.

    Attributes:
        wait: The first forward that may be measured.
        measured: Whether a step was measured; no slot has bits if all are exact or pinned.
        failures: The number of steps in a row that could not be measured.
        blanks: The number of measurements in a row whose gradient was zero or not finite.
        agreement: The agreement with other ranks, if there are any.
    """

    wait: int = 0
    measured: bool = False
    failures: int = 0
    blanks: int = 0
    agreement: Agreement | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, without the agreement."""
        return {name: value for name, value in vars(self).items() if name != "agreement"}

    @staticmethod
    def check_state(path: str, state: object) -> None:
        """Raise TypeError or ValueError unless ``state`` has the counters."""
        check_keys(path, state, vars(_Progress()).keys() - {"agreement"})
        assert isinstance(state, Mapping)
        check_flag(f"{path}['measured']", state["measured"])
        for name in ("wait", "failures", "blanks"):
            check_count(f"{path}[{name!r}]", state[name])


class Adaptation:
    """Finds the bits of one model's slots from some of its steps.

    Args:
        scheme: The scheme, which gets the measurements.
        interval: The number of forwards between measurements.

    Attributes:
        scheme: The scheme.
        has_part: Whether each rank of the default group runs the model on a part of a graph.
        measurements: The number of measured steps.
        row_weights: The weights of the rows of each slot.
    """

    def __init__(self, scheme: Scheme, interval: int) -> None:
        self.scheme = scheme
        self.has_part = False
        self.measurements: int = 0
        self.row_weights: Final = RowWeights()
        self._interval = interval
        self._forwards = 0
        self._progress = _Progress()
        self._measuring: weakref.ref[Measurement] | None = None
        self._began = 0  # the forward that is measured
        self._warned: set[str] = set()
        self._alarmed = False
        self._trained: str | None = None  # `requires_grad` of the parameters, as ones and zeros
        # By the other sets of trained parameters: the state of the scheme, and the progress.
        self._others: dict[str, tuple[dict[str, Any], _Progress]] = {}

    def next_step(self, model: nn.Module) -> None:
        """Load the bits that ranks have agreed on, if due, before a training forward starts.

        The ranks are those of ``DistributedDataParallel``, or those with the parts of one graph.
        """
        ddp = data_parallel(model)
        if ddp is None and not self.has_part:
            return
        self._update_trained(model)
        progress = self._progress
        if progress.agreement is None:
            group = dist.group.WORLD if ddp is None else ddp.process_group
            progress.agreement = agreement_of(group)
        sums = ddp is None or ddp.require_backward_grad_sync
        if progress.agreement is None or not sums:
            return
        outcome = progress.agreement.next_step(self._decide)
        if outcome is None:
            return
        # A late measurement of this round does not count in the next.
        self._measuring = None
        self.scheme.load_state_dict(outcome["scheme"])
        self._forwards = max(self._forwards, outcome["forwards"])
        self._warn_if_noise_dominates()

    def _decide(self, measured: Measured | None) -> dict[str, Any]:
        """Return the outcome of a round of all ranks."""
        scheme = copy.deepcopy(self.scheme)
        if measured is not None:
            scheme.measure(*measured)
        return {"scheme": scheme.state_dict(), "forwards": self._forwards}

    def begin(self, model: nn.Module, lock: AbstractContextManager[object]) -> Measurement | None:
        """Return the measurement of the forward that starts, or None if none is due.

        Args:
            model: The model.
            lock: A lock that is held while the measurement is recorded, at the end of backward.

        Returns:
            A measurement, which is to watch the output.
        """
        self._update_trained(model)
        self._forwards += 1
        if not self._is_due:
            return None
        if is_sharded(model):
            self._fail("its parameters are sharded (FSDP)")
            return None
        measuring: weakref.ref[Measurement]

        def done(outcome: Outcome) -> None:
            with lock:
                if self._measuring is not measuring:
                    return
                self._measuring = None
                if isinstance(outcome, Exception):
                    text = f"an operation raised {type(outcome).__name__}: {outcome}"
                    self._fail(text.splitlines()[0][:300])
                else:
                    self._record(outcome, row_squares)

        measurement = Measurement(done)
        row_squares = measurement.row_squares
        self._measuring, self._began = (measuring := weakref.ref(measurement)), self._forwards
        return measurement

    def cancel(self, reason: str) -> None:
        """Give up the measurement of a forward that cannot be measured."""
        self._measuring = None
        self._fail(reason)

    def _record(self, measured: Measured | None, row_squares: Mapping[str, Tensor]) -> None:
        """Record a measurement; None if the gradient was zero or not finite."""
        progress = self._progress
        progress.failures = 0
        self.measurements += 1
        if progress.agreement is not None:
            progress.agreement.publish(measured)
        if measured is not None:
            progress.blanks, progress.measured = 0, True
            self.row_weights.add(row_squares)
            if progress.agreement is None:
                self.scheme.measure(*measured)
                self._warn_if_noise_dominates()
            return
        progress.wait = self._forwards + self._interval
        progress.blanks += 1
        if progress.blanks == _ENOUGH:
            self._warn(
                f"in {_ENOUGH} steps the gradient was zero or not finite. Look for NaN or infinity "
                "in the loss and, if there is none without gact_graph, take more bits"
            )

    @property
    def _is_due(self) -> bool:
        progress = self._progress
        early = self._forwards == min(_EARLY, self._interval)
        known = self.scheme.measured or progress.measured
        due = early or self._forwards % self._interval == 0 or not known
        blocked = self._forwards < progress.wait or progress.failures >= _ENOUGH
        blocked |= progress.agreement is not None and progress.agreement.waits
        # A step without a backward is gone, with its graph, unless the caller keeps its output.
        is_pending = self._measuring is not None and self._measuring() is not None
        is_pending &= self._forwards - self._began < _PATIENCE
        return due and not blocked and not is_pending

    def _update_trained(self, model: nn.Module) -> None:
        """Switch to the bits of the parameters that require gradients now.

        The noise of a frozen layer has no effect on the gradient, so each set of trained parameters
        has its own bits, which start at the average. The last few sets are remembered, since layers
        may be trained in turns.
        """
        trained = "".join("01"[p.requires_grad] for p in model.parameters())
        if self._trained is not None and trained != self._trained:
            self._measuring = None
            state = self.scheme.state_dict()
            self._others[self._trained] = state, self._progress
            if len(self._others) > _REMEMBERED:
                del self._others[next(iter(self._others))]
            empty = {"sizes": {}, "sensitivities": {}, "bits": {}, "least": state["least"]}
            new = empty, _Progress(wait=self._forwards)
            state, self._progress = self._others.pop(trained, new)
            self.scheme.load_state_dict(state)
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, so that a resumed run measures at the same steps, the weights of
        rows, and the bits of the other sets of trained parameters."""
        return {
            "forwards": self._forwards,
            "measurements": self.measurements,
            "row_weights": self.row_weights.state_dict(),
            "trained": self._trained,
            "progress": self._progress.state_dict(),
            "others": {
                trained: {"scheme": dict(scheme), "progress": progress.state_dict()}
                for trained, (scheme, progress) in self._others.items()
            },
        }

    @staticmethod
    def check_state(path: str, state: object) -> None:
        """Raise TypeError or ValueError unless :meth:`load_state_dict` accepts ``state``.

        Args:
            path: The name of the state in messages.
            state: Any object.
        """
        # Version 0.6.0 saved a "turn", and it and 0.7.0 the number of "passes".
        newer = "measurements", "row_weights", "trained", "progress", "others"
        check_keys(path, state, ("forwards",), ("passes", "turn", *newer))
        assert isinstance(state, Mapping)
        if state.get("trained") is not None:
            check_names(f"{path}['trained']", [state["trained"]])
        if "progress" in state:
            _Progress.check_state(f"{path}['progress']", state["progress"])
        check_by_slot(f"{path}['others']", state.get("others", {}), _check_other)
        RowWeights.check_state(f"{path}['row_weights']", state.get("row_weights", {}))
        for key in ("forwards", "measurements"):
            check_count(f"{path}[{key!r}]", state.get(key, 0))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`check_state` has accepted.

        A step whose backward has not ended no longer counts.
        """
        self._forwards, self.measurements = state["forwards"], state.get("measurements", 0)
        self.row_weights.load_state_dict(state.get("row_weights", {}))
        self._measuring, self._trained = None, state.get("trained")
        self._progress = _Progress(**state.get("progress", {}))
        self._others = {
            trained: (dict(other["scheme"]), _Progress(**other["progress"]))
            for trained, other in state.get("others", {}).items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_progress": replace(self._progress, agreement=None),
            "_measuring": None,
            "_others": {
                trained: (dict(scheme), replace(progress, agreement=None))
                for trained, (scheme, progress) in self._others.items()
            },
        }

    def _warn_if_noise_dominates(self) -> None:
        """Raise the alarm of section 4.2 of the paper."""
        ratio = self.scheme.variance_ratio
        if self._alarmed or ratio is None or ratio <= ALARM:
            return
        self._alarmed = True
        average = self.scheme.average_for(ALARM / 2)
        advice = "level='lossless'" if average is None else f"bits={average:g}"
        warn(
            f"The noise of compression dominates the gradient: its variance is {ratio:.2g} of the "
            "gradient's mean square, which includes it. Most of it comes from "
            f"{', '.join(self.scheme.worst())}. "
            f"Take more bits: by the measurements, {advice} brings it below {ALARM / 2:g}.",
        )

    def _fail(self, reason: str) -> None:
        self._progress.failures += 1
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason in self._warned or len(self._warned) == _ENOUGH:
            return
        self._warned.add(reason)
        warn(
            f"gact_graph could not measure which tensors need more bits, because {reason}. "
            "Training continues with the current bits; adaptive=False uses the same bits "
            "everywhere and measures nothing.",
        )


def _check_other(path: str, state: object) -> None:
    """Raise TypeError or ValueError unless ``state`` is that of a set of trained parameters."""
    check_keys(path, state, ("scheme", "progress"))
    assert isinstance(state, Mapping)
    Scheme.check_state(f"{path}['scheme']", state["scheme"])
    _Progress.check_state(f"{path}['progress']", state["progress"])

"""When sensitivities are measured: as soon as possible, and once more at each interval."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from gact_graph.adaptive.agreement import Agreement, agreement_of, data_parallel
from gact_graph.adaptive.scheme import Scheme
from gact_graph.adaptive.sensitivity import Measured, Measurement, Outcome
from gact_graph.adaptive.state_checks import check_count, check_keys
from gact_graph.support.warn import warn

_ENOUGH = 3
"""Failures in a row after which no forward is recorded, until other parameters learn."""

_REMEMBERED = 8
"""Sets of learning parameters whose bits are remembered."""

ALARM = 0.5
"""A warning is given once if the variance that compression adds is more than this share of the
gradient's mean square, and so more than the gradient and all its other variance together."""

_EARLY = 32
"""This forward is measured although the first interval has not ended: sensitivities change fast
when training begins."""

_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})


@dataclass
class _Pending:
    """When to measure next, by what came of the last attempts.

    Attributes:
        wait: Nothing is measured before this forward.
        failures: Steps in a row that could not be measured.
        blanks: Measurements in a row whose gradient was zero or not finite.
        agreement: With the other ranks, if there are any.
    """

    wait: int = 0
    failures: int = 0
    blanks: int = 0
    agreement: Agreement | None = None


class Adaptation:
    """Finds the bits of one model's slots from some of its steps.

    Args:
        scheme: Gets what is measured.
        interval: Forwards from one measurement to the next.

    Attributes:
        scheme: The same.
        has_part: Whether the model runs on a part of a graph in each rank of the default group.
        measurements: How many steps were measured.
    """

    def __init__(self, scheme: Scheme, interval: int) -> None:
        self.scheme = scheme
        self.has_part = False
        self.measurements = 0
        self._interval = interval
        self._forwards = 0
        self._pending = _Pending()
        self._measuring: weakref.ref[Measurement] | None = None
        self._complained: set[str] = set()
        self._alarmed = False
        self._learns: tuple[bool, ...] | None = None
        # By which parameters learn: the scheme's state, and what is pending.
        self._others: dict[tuple[bool, ...], tuple[dict[str, Any], _Pending]] = {}

    def next_step(self, model: nn.Module) -> None:
        """Called when a training forward starts, before anything is measured.

        Takes over what the ranks of ``DistributedDataParallel``, or of one graph, have agreed on,
        if that is due.
        """
        ddp = data_parallel(model)
        if ddp is None and not self.has_part:
            return
        self._see_what_learns(model)
        pending = self._pending
        if pending.agreement is None:
            pending.agreement = agreement_of(dist.group.WORLD if ddp is None else ddp.process_group)
        sums = ddp is None or ddp.require_backward_grad_sync
        if pending.agreement is None or not sums:
            return
        outcome = pending.agreement.next_step(self._decide)
        if outcome is None:
            return
        # What was measured in this round and comes late does not count in the next.
        self._measuring = None
        self.scheme.load_state_dict(outcome["scheme"])
        self._forwards = max(self._forwards, outcome["forwards"])
        self._warn_if_noise_dominates()

    def _decide(self, measured: Measured | None) -> dict[str, Any]:
        """The outcome of a round of all ranks."""
        scheme = copy.deepcopy(self.scheme)
        if measured is not None:
            scheme.measure(*measured)
        return {"scheme": scheme.state_dict(), "forwards": self._forwards}

    def _take(self, measured: Measured | None) -> None:
        """Takes a measurement in; None is one whose gradient was zero or not finite."""
        pending = self._pending
        pending.failures = 0
        self.measurements += 1
        if pending.agreement is not None:
            pending.agreement.publish(measured)
        if measured is not None:
            pending.blanks = 0
            if pending.agreement is None:
                self.scheme.measure(*measured)
                self._warn_if_noise_dominates()
            return
        pending.wait = self._forwards + self._interval
        pending.blanks += 1
        if pending.blanks == _ENOUGH:
            self._complain(
                f"in {_ENOUGH} steps the gradient was zero or not finite. Look for NaN or infinity "
                "in the loss and, if there is none without gact_graph, take more bits"
            )

    def begin(self, model: nn.Module, lock: AbstractContextManager[object]) -> Measurement | None:
        """Called when a forward starts.

        Args:
            model: The model.
            lock: Held while a measurement is taken in, when backward has ended.

        Returns:
            The measurement of this step, which is to watch the output; None where none is due.
        """
        self._see_what_learns(model)
        self._forwards += 1
        if not self._is_due:
            return None
        if any(_is_sharded(part) for part in model.modules()):
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
                    self._take(outcome)

        measurement = Measurement(done)
        self._measuring = measuring = weakref.ref(measurement)
        return measurement

    @property
    def _is_due(self) -> bool:
        pending = self._pending
        early = self._forwards == min(_EARLY, self._interval)
        due = early or self._forwards % self._interval == 0 or not self.scheme.measured
        held_up = self._forwards < pending.wait or pending.failures >= _ENOUGH
        held_up |= pending.agreement is not None and pending.agreement.waits
        # A step whose backward never came is gone, with its graph.
        return due and not held_up and (self._measuring is None or self._measuring() is None)

    def _see_what_learns(self, model: nn.Module) -> None:
        """Changes to the bits of the parameters that learn now.

        The noise of a frozen layer moves no gradient, so each set of learning parameters has bits
        of its own, which start at the average. The last few sets are remembered, because layers
        may learn in turns.
        """
        learns = tuple(p.requires_grad for p in model.parameters())
        if self._learns is not None and learns != self._learns:
            self._measuring = None
            state = self.scheme.state_dict()
            self._others[self._learns] = state, self._pending
            if len(self._others) > _REMEMBERED:
                del self._others[next(iter(self._others))]
            nothing = {"sizes": {}, "sensitivities": {}, "bits": {}, "least": state["least"]}
            new = nothing, _Pending(wait=self._forwards)
            state, self._pending = self._others.pop(learns, new)
            self.scheme.load_state_dict(state)
        self._learns = learns

    def state_dict(self) -> dict[str, int]:
        """Counters, so that a resumed run measures when this one would."""
        return {"forwards": self._forwards, "measurements": self.measurements}

    @staticmethod
    def check_state(path: str, state: object) -> None:
        """Raises TypeError or ValueError unless :meth:`load_state_dict` can take ``state``.

        Args:
            path: What to call the state in a message.
            state: Anything.
        """
        # Version 0.6.0 saved a "turn", and it and 0.7.0 how many "passes" they had taken.
        check_keys(path, state, ("forwards",), ("measurements", "passes", "turn"))
        assert isinstance(state, Mapping)
        for key in ("forwards", "measurements"):
            check_count(f"{path}[{key!r}]", state.get(key, 0))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what :meth:`state_dict` gave and :meth:`check_state` has passed.

        A step whose backward has not ended counts no more.
        """
        self._forwards, self.measurements = state["forwards"], state.get("measurements", 0)
        self._measuring = self._learns = None
        self._pending = _Pending()
        self._others.clear()

    def _warn_if_noise_dominates(self) -> None:
        """The alarm of the paper's section 4.2."""
        ratio = self.scheme.variance_ratio
        if self._alarmed or ratio is None or ratio <= ALARM:
            return
        self._alarmed = True
        cure = self.scheme.cure(ALARM / 2)
        advice = "level='lossless'" if cure is None else f"bits={cure:g}"
        warn(
            f"The noise of compression dominates the gradient: its variance is {ratio:.2g} of the "
            "gradient's mean square, which has it in it. Most of it comes from "
            f"{', '.join(self.scheme.worst())}. "
            f"Take more bits: by what was measured, {advice} brings it below {ALARM / 2:g}.",
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_pending": replace(self._pending, agreement=None),
            "_measuring": None,
            "_others": {},
        }

    def _fail(self, reason: str) -> None:
        self._pending.failures += 1
        self._complain(reason)

    def _complain(self, reason: str) -> None:
        if reason in self._complained or len(self._complained) == _ENOUGH:
            return
        self._complained.add(reason)
        warn(
            f"gact_graph could not measure which tensors need more bits, because {reason}. "
            "Training goes on and the bits stay as they are; adaptive=False asks for the same "
            "bits everywhere, and measures nothing.",
        )


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ in _SHARDED for kind in type(module).__mro__)

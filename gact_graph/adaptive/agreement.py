"""How the ranks of a process group come to the same bits, without waiting for another.

Ranks of ``DistributedDataParallel`` train on batches of their own, and ranks with a part of a graph
on its nodes, so each measures something else, and at other times: one may fail to measure, or have
no batch left. A collective would then stop the others. So what is measured
goes through the key-value store of the process group, of which a rank only ever asks what is there:

1. Measurements come in rounds. A rank writes what it measured under the number of the round.
2. Whoever first sees all of them takes their mean, allocates bits by it, and writes the outcome
   with the number of a step that is two ahead. After :data:`PATIENCE` steps the mean is that of
   those that are there. Only the first outcome that is written counts.
3. At that step each rank takes the outcome over, and the next round begins.

A step is a forward whose backward sums gradients over the ranks, or one on a part of a graph. No
rank ends that sum before all have begun it, and none ends the forward without the others, so within
two steps each rank has seen the outcome, and all take it over at the same step. There are
exceptions, and soon after them ranks have the same bits again: where steps are queued on a GPU, or
parts have no edges between them, a rank may see the outcome late and takes it over as soon as it
does; and after an epoch with fewer batches on some ranks (``join()``) the numbers of their steps
differ, and one of them may be a step behind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gact_graph.adaptive.sensitivity import Measured
from gact_graph.support.warn import warn

PATIENCE = 8
"""Steps after which a rank no longer waits for the measurements of others."""

_LEAD = 2
"""Steps from the outcome of a round to the one at which it is taken over."""

_numbers = itertools.count()

Decide = Callable[[Measured | None], dict[str, Any]]
"""The outcome of a round, from the mean of what was measured; None if nothing was."""


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` that the model is, or within whose forward it runs."""
    if isinstance(model, DistributedDataParallel):
        return model
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def agreement_of(group: dist.ProcessGroup | None) -> Agreement | None:
    """A new agreement of the ranks of a group; None if there is one alone, or no group.

    All ranks make their agreements in the same order.
    """
    if group is None or group.size() == 1:
        return None
    name = f"gact_graph/{next(_numbers)}"
    return Agreement(group.get_group_store(), name, group.rank(), group.size())


class Agreement:
    """Rounds of one model, or of one of its methods.

    Args:
        store: The group's.
        name: What the keys begin with, on all ranks the same.
        rank: This one, in the group.
        size: Of the group.
    """

    def __init__(
        self, store: torch._C._distributed_c10d.Store, name: str, rank: int, size: int
    ) -> None:
        self._store = store
        self._name = name
        self._rank, self._size = rank, size
        self._round = 0
        self._step = 0
        self._published: int | None = None  # at which step
        self._takes_over: int | None = None  # at which step
        self._broken = False

    @property
    def waits(self) -> bool:
        """Whether this rank has measured in this round, or has no others to measure with."""
        return self._published is not None or self._broken

    def publish(self, measured: Measured | None) -> None:
        """Writes what was measured; None: nothing could be."""
        text = json.dumps(measured)
        self._try(lambda: self._store.set(self._key(self._rank), text))
        self._published = self._step

    def next_step(self, decide: Decide) -> dict[str, Any] | None:
        """Called at each step.

        Args:
            decide: Finds the outcome, if it is up to this rank.

        Returns:
            The outcome that is to be taken over now.
        """
        self._step += 1
        found: dict[str, Any] | None = self._try(lambda: self._outcome(decide))
        if found is None:
            return None
        if self._takes_over is None:
            # With numbers that have nothing to do with each other, both count from here.
            is_near = abs(found["step"] - _LEAD - self._step) <= _LEAD
            self._takes_over = found["step"] if is_near else self._step + _LEAD
        if self._step < self._takes_over:
            return None
        self._step = max(self._step, found["step"])
        self._round += 1
        self._published = self._takes_over = None
        outcome: dict[str, Any] = found["outcome"]
        return outcome

    def _outcome(self, decide: Decide) -> dict[str, Any] | None:
        """That of this round, and its step, if there is one; this rank may find it."""
        key = self._key("outcome")
        found = self._read(key)
        if found is not None or self._published is None:
            return found
        ranks = [self._key(rank) for rank in range(self._size)]
        if not self._store.check(ranks):
            if self._step < self._published + PATIENCE:
                return None
            ranks = [rank for rank in ranks if self._store.check([rank])]
        measured = [found for found in map(self._read, ranks) if found is not None]
        mean = _mean([Measured(*one) for one in measured]) if measured else None
        own = json.dumps({"step": self._step + _LEAD, "outcome": decide(mean)})
        # Another rank may have come to it in between: then that one's is read.
        self._store.compare_set(key, "", own)
        return self._read(key)

    def _read(self, key: str) -> Any:
        """What stands there; None for nothing."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, what: object) -> str:
        return f"{self._name}/{self._round}/{what}"

    def _try(self, ask: Callable[[], Any]) -> Any:
        """Asks the store. It ends with the process that holds it, which must not end this one."""
        if self._broken:
            return None
        try:
            return ask()
        except RuntimeError as error:
            self._broken = True
            warn(
                "gact_graph can no longer agree with the other ranks on bits, because the store of "
                f"the process group raised {type(error).__name__}. This rank keeps those it has."
            )
            return None


def _mean(measured: Sequence[Measured]) -> Measured:
    """The mean of each number, over those that have it: batches may lack a slot."""
    values: dict[str, list[float]] = {}
    for one in measured:
        for slot, value in one.sensitivities.items():
            values.setdefault(slot, []).append(value)
    return Measured(
        {slot: sum(found) / len(found) for slot, found in sorted(values.items())},
        sum(one.error for one in measured) / len(measured),
        sum(one.explained for one in measured) / len(measured),
    )

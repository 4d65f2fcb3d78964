"""Agreement of the ranks of a process group on bits, without waiting for any rank.

Ranks of ``DistributedDataParallel`` train on their own batches, and ranks with a part of a graph on
its nodes, so their measurements differ, and are made at different times: a rank may fail to
measure, or have no batches left. A collective would then block the others. So measurements are
exchanged through the key-value store of the process group, which a rank only asks for keys that are
there:

1. Measurements come in rounds. A rank writes its measurement under the number of the round.
2. The first rank that sees all of them computes their mean, allocates bits from it, and writes the
   outcome with a step number that is two ahead. After :data:`PATIENCE` steps the mean is that of
   the measurements that are there. Only the first outcome that is written counts.
3. At that step each rank loads the outcome, and the next round begins.

A step is a forward whose backward sums gradients over the ranks, or a forward on a part of a graph.
No rank ends that sum before all have begun it, and none ends the forward without the others, so
within two steps each rank has seen the outcome, and all load it at the same step. There are two
exceptions, soon after which ranks have the same bits again. If steps are queued on a GPU, or parts
have no edges between them, a rank may see the outcome late, and loads it then. After an epoch with
fewer batches on some ranks (``join()``) their step numbers differ, and a rank may be a step behind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gact_graph.adaptive.sensitivity import Measured
from gact_graph.support.messages import warn
from gact_graph.support.scopes import Scopes

PATIENCE = 8
"""The number of steps after which a rank no longer waits for the measurements of others."""

_LEAD = 2
"""The number of steps from the outcome of a round to the step that loads it."""

_numbers = itertools.count()

Decide = Callable[[Measured | None], dict[str, Any]]
"""Computes the outcome of a round from the mean of its measurements; None if there are none."""


_alone = Scopes(False)


def alone() -> AbstractContextManager[None]:
    """Decide without other ranks inside: they do not run the same steps."""
    return _alone.entered(True)


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` that the model is, or whose forward it runs in.

    None inside of :func:`alone`.
    """
    if _alone.value:
        return None
    if isinstance(model, DistributedDataParallel):
        return model
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def agreement_of(group: dist.ProcessGroup | None) -> Agreement | None:
    """Return a new agreement of the ranks of a group, or None without other ranks.

    All ranks create their agreements in the same order.
    """
    if group is None or group.size() == 1:
        return None
    name = f"gact_graph/{next(_numbers)}"
    return Agreement(group.get_group_store(), name, group.rank(), group.size())


class Agreement:
    """The rounds of one method of a model.

    Args:
        store: The store of the process group.
        name: The prefix of keys, equal on all ranks.
        rank: This rank in the group.
        size: The number of ranks.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
        name: str,
        rank: int,
        size: int,
    ) -> None:
        self._store = store
        self._name = name
        self._rank, self._size = rank, size
        self._round = 0
        self._step = 0
        self._published: int | None = None  # at this step
        self._loads_at: int | None = None  # this step
        self._broken = False

    @property
    def waits(self) -> bool:
        """Whether this rank has measured in this round, or lost the other ranks."""
        return self._published is not None or self._broken

    def publish(self, measured: Measured | None) -> None:
        """Write a measurement; None if it failed."""
        text = json.dumps(measured)
        self._try(lambda: self._store.set(self._key(self._rank), text))
        self._published = self._step

    def next_step(self, decide: Decide) -> dict[str, Any] | None:
        """Start a step, and return the outcome to load now, if there is one.

        Args:
            decide: Computes the outcome, if this rank has to.
        """
        self._step += 1
        result: dict[str, Any] | None = self._try(lambda: self._result(decide))
        if result is None:
            return None
        if self._loads_at is None:
            # If the step numbers of the ranks are unrelated, this rank counts from here.
            is_near = abs(result["step"] - _LEAD - self._step) <= _LEAD
            self._loads_at = result["step"] if is_near else self._step + _LEAD
        if self._step < self._loads_at:
            return None
        self._step = max(self._step, result["step"])
        self._round += 1
        self._published = self._loads_at = None
        outcome: dict[str, Any] = result["outcome"]
        return outcome

    def _result(self, decide: Decide) -> dict[str, Any] | None:
        """Return the step and the outcome of this round, if it has them or this rank finds them."""
        key = self._key("outcome")
        result = self._read(key)
        if result is not None or self._published is None:
            return result
        ranks = [self._key(rank) for rank in range(self._size)]
        if not self._store.check(ranks):
            if self._step < self._published + PATIENCE:
                return None
            ranks = [rank for rank in ranks if self._store.check([rank])]
        measured = [Measured(*numbers) for numbers in map(self._read, ranks) if numbers is not None]
        outcome = decide(_mean(measured) if measured else None)
        # Another rank may have written a result in between, which is then read.
        own = json.dumps({"step": self._step + _LEAD, "outcome": outcome})
        self._store.compare_set(key, "", own)
        return self._read(key)

    def _read(self, key: str) -> Any:
        """Return the value of a key, or None if it is not there."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, name: object) -> str:
        return f"{self._name}/{self._round}/{name}"

    def _try(self, request: Callable[[], Any]) -> Any:
        """Send a request to the store. It ends with its process, which must not end this one."""
        if self._broken:
            return None
        try:
            return request()
        except RuntimeError as error:
            self._broken = True
            warn(
                "gact_graph can no longer agree with the other ranks on bits, because the store of "
                f"the process group raised {type(error).__name__}. This rank keeps its current "
                "bits."
            )
            return None


def _mean(measured: Sequence[Measured]) -> Measured:
    """Return the mean of each number over the ranks that have it: batches may lack a slot."""
    values: dict[str, list[float]] = {}
    for rank in measured:
        for slot, value in rank.sensitivities.items():
            values.setdefault(slot, []).append(value)
    return Measured(
        {slot: sum(v) / len(v) for slot, v in sorted(values.items())},
        sum(rank.error for rank in measured) / len(measured),
        sum(rank.explained for rank in measured) / len(measured),
    )

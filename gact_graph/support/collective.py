"""Errors of collective calls of ``torch.distributed``, with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def collective(purpose: str) -> Iterator[None]:
    """Explain the error of a collective call inside: another process has failed, or does not call.

    Args:
        purpose: What all processes do in the call, as in ``"exchange rows"``.

    Raises:
        RuntimeError: The call failed, or the timeout of the group passed.
    """
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeError(
            f"Expected all {dist.get_world_size()} processes to {purpose} (got {reason!r}); a "
            "process has ended, runs other layers, or takes longer than the timeout of the group, "
            "which init_process_group(timeout=...) sets; start all processes again from a "
            "checkpoint"
        ) from error

"""Transforms of PyTorch under which a model runs as it is."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Whether ``torch.func`` (grad, vmap, jvp) or ``torch.jit.trace`` runs on this thread.

    Under ``torch.func`` tensors have no memory that could be packed, and saved-tensor hooks are
    refused. A trace remembers operations and not the hooks around them.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or torch._C._get_tracing_state() is not None

"""Puts the patches on a model and finds them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gact_graph.api.controller import Controller
from gact_graph.api.forward import CompressedForward
from gact_graph.api.methods import methods_of
from gact_graph.capture.config import Config
from gact_graph.support.patch import BoundPatch


def install(model: nn.Module, config: Config, methods: Sequence[str] = ()) -> CompressedForward:
    """Patches the model's forward and the other methods that are followed.

    Returns:
        The patch of the model's own forward.

    Raises:
        TypeError: ``methods`` is no sequence of names.
        ValueError: The model has no parameters, is wrapped, holds a wrapped module or is part of a
            wrapped model, or is scripted or traced by torch.jit; or it lacks a method.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected a model that runs in Python (got {type(model).__name__}, which torch.jit "
            "made); wrap the model that it was made of"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(f"Expected a model with parameters (got {type(model).__name__} with none)")
    where = _where_wrapped(model)
    if where is not None:
        raise ValueError(
            f"Expected a model that is not wrapped (got {type(model).__name__}: {where}); "
            "call gact_graph.unwrap on the wrapped module first"
        )
    followed = [*methods_of(model, methods)]
    controller = Controller(config, model)
    patches = [CompressedForward(module, controller, part, name) for module, part, name in followed]
    for patch in patches:
        patch.first = patches[0]
    patches[0].others = patches[1:]
    return patches[0]


def remove(patch: CompressedForward) -> None:
    """Takes off what :func:`install` put on the model."""
    for handle in reversed(patch.halo):
        handle.remove()
    for other in reversed([patch, *patch.others]):
        other.remove()
    patch.controller.remove_hooks()


def _where_wrapped(model: nn.Module) -> str | None:
    """What of the model is wrapped: itself, a part of it, or a model that it is a part of."""
    for name, module in model.named_modules():
        if patch_of(module) is not None:
            return f"its submodule {name!r} is wrapped" if name else "it is wrapped already"
    for patch in CompressedForward.living():
        whole = patch.module
        if whole is None or patch_of(whole) is not patch:
            continue
        for name, module in whole.named_modules():
            if module is model:
                return f"it is the submodule {name!r} of a wrapped {type(whole).__name__}"
    return None


def patch_of(model: nn.Module) -> CompressedForward | None:
    """The patch of a module's forward, or None."""
    forward = vars(model).get("forward")
    if isinstance(forward, BoundPatch):  # of a shallow copy
        forward = forward.patch
    return forward if isinstance(forward, CompressedForward) else None


def wrapped(model: nn.Module) -> CompressedForward:
    """The patch of a wrapped model's forward.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    check_module(model)
    patch = patch_of(model)
    if patch is not None and patch.part:
        raise ValueError(
            f"Expected a wrapped model (got {type(model).__name__}, the part {patch.part!r} of "
            "one); pass the model that was wrapped"
        )
    if patch is None:
        raise ValueError(
            f"Expected a wrapped model (got a plain {type(model).__name__}); "
            "call gact_graph.wrap on it first"
        )
    return patch


def check_module(model: object) -> None:
    """Raises TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected model to be a torch.nn.Module (got {type(model).__name__})")

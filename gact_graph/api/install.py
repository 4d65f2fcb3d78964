"""Choose the methods of a model to track, install their patches, and find the patches again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GAE

from gact_graph.api.controller import Controller
from gact_graph.api.forward import CompressedForward
from gact_graph.capture.config import Config
from gact_graph.support.patch import BoundPatch

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def install(model: nn.Module, config: Config, methods: Sequence[str]) -> CompressedForward:
    """Patch the forward of a model and its other tracked methods.

    Args:
        model: The model.
        config: The settings.
        methods: Names of methods to track in addition to ``forward``. If empty, ``encode`` of PyG's
            autoencoders and ``forward`` of each part of a ``LightningModule`` are tracked, whose
            ``training_step`` calls the parts individually.

    Returns:
        The patch of the model's own forward.

    Raises:
        TypeError: If ``methods`` is not a sequence of names.
        ValueError: If the model has no parameters or lacks a method; is scripted or traced by
            torch.jit; or is wrapped, contains a wrapped module or is part of a wrapped model.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected a model that runs in Python (got {type(model).__name__}, made by torch.jit);"
            " wrap the original model"
        )
    check_parameters(model)
    reason = _why_wrapped(model)
    if reason is not None:
        raise ValueError(
            f"Expected a model that is not wrapped (got {type(model).__name__}: {reason}); "
            "call gact_graph.unwrap on the wrapped module first"
        )
    tracked = [*_methods_of(model, methods)]
    controller = Controller(config, model)
    patches = [CompressedForward(module, controller, part, name) for module, part, name in tracked]
    for patch in patches:
        patch.first = patches[0]
    patches[0].others = patches[1:]
    return patches[0]


def remove(patch: CompressedForward) -> None:
    """Remove everything that :func:`install` added to the model."""
    for handle in reversed(patch.halo):
        handle.remove()
    for other in reversed([patch, *patch.others]):
        other.remove()
    patch.controller.remove_hooks()


def patch_of(model: nn.Module) -> CompressedForward | None:
    """Return the patch of a module's forward; None without a patch."""
    forward = vars(model).get("forward")
    if isinstance(forward, BoundPatch):  # of a shallow copy
        forward = forward.patch
    elif not isinstance(forward, CompressedForward):
        forward = _decorated(forward, model)
    return forward if isinstance(forward, CompressedForward) and not forward.removed else None


def _decorated(forward: Any, model: nn.Module) -> Any:
    """Return the patch of a model inside a method of another library, as of accelerate."""
    forward = inspect.unwrap(forward)
    while isinstance(forward, MethodType):
        forward = forward.__func__ if forward.__self__ is model else forward.__self__
    return forward if getattr(forward, "module", None) is model else None


def wrapped(model: nn.Module) -> CompressedForward:
    """Return the patch of a wrapped model's forward.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is not wrapped.
    """
    check_module(model)
    patch = patch_of(model)
    if patch is not None and patch.part:
        raise ValueError(
            f"Expected a wrapped model (got {type(model).__name__}, the part {patch.part!r} of "
            "a wrapped model); pass the model that was wrapped"
        )
    if patch is None:
        raise ValueError(
            f"Expected a wrapped model (got a plain {type(model).__name__}); "
            "call gact_graph.wrap on it first"
        )
    return patch


def check_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected model to be a torch.nn.Module (got {type(model).__name__})")


def check_parameters(model: nn.Module) -> None:
    """Raise ValueError unless ``model`` has a parameter."""
    if next(model.parameters(), None) is None:
        raise ValueError(f"Expected a model with parameters (got {type(model).__name__} with none)")


def _why_wrapped(model: nn.Module) -> str | None:
    """Return in which respect a model is wrapped: itself, in a part, or as a part of a model."""
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


def _methods_of(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield the methods to track: the module, its name in the model, and the method's name."""
    yield model, "", "forward"
    is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_sequence or not all(isinstance(name, str) for name in names):
        raise TypeError(f"Expected methods to be a sequence of names (got {names!r})")
    for name in dict.fromkeys(names):
        if not callable(getattr(type(model), name, None)):
            raise ValueError(
                f"Expected methods to name methods of {type(model).__name__} (got {name!r})"
            )
        if name != "forward":
            yield model, "", name
    if names:
        return
    if isinstance(model, GAE):
        yield model, "", "encode"
    # By name, since two packages have this class and neither needs to be installed.
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        yield from _parts(model, "")


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule) or next(child.parameters(), None) is None:
            continue
        if isinstance(child, _CONTAINERS):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield child, f"{prefix}{name}", "forward"

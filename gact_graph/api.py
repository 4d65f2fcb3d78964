"""What a user calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from gact_graph.config import Config
from gact_graph.controller import CompressedForward, Controller, should_compress
from gact_graph.report import Report

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    bits: float = 4,
    *,
    level: str = "L1",
    adaptive: bool = True,
    adapt_interval: int = 100,
    pin: Mapping[str, int] | None = None,
    group_size: int = 256,
    blocks: int | str | None = None,
    seed: int = 0,
) -> Model:
    """Makes ``model`` keep what it saves for backward in a few bits an element.

    Activation compressed training as in `GACT <https://arxiv.org/abs/2206.11357>`_ (ICML 2022). The
    training loop stays as it is. In evaluation mode and under ``no_grad`` nothing changes.

    Args:
        model: Any module with parameters. It is changed in place: same object, class and
            ``state_dict``.
        bits: Bits an element of a quantized context: 1 to 16, or 32 for none quantized. With
            ``adaptive`` it is the average over all of them, and may be a fraction.
        level: ``"L0"`` keeps every context as PyTorch does and only takes account of them.
            ``"lossless"`` keeps masks, indices, gathered tensors and what is never read in exact
            small forms: gradients are bit-identical. ``"L1"`` also quantizes what is left.
            ``"L2"`` is ``"L1"`` with masks and quantized contexts of 1 MiB or more swapped from a
            CUDA device to pinned host memory; elsewhere it equals ``"L1"``, and ``report`` says
            so. With ``"CB1"`` a message passing layer saves its inputs alone, as in L1, and is
            computed again in backward; ``"CB2"`` does the same in blocks (``blocks="auto"``), and
            what they read waits at 8 bits or more while a layer is computed again.
        adaptive: Spend the bits where the gradient needs them, by sensitivities that are measured
            while the model trains (paper, section 4.1): after the first step one forward and
            backward for each quantized context, later for one of them at each interval. Without it
            all contexts have the same bits.
        adapt_interval: Forwards from one such refresh to the next.
        pin: Bits for the slots whose names match a pattern, as in ``{"*.lin*": 8}``.
        group_size: Elements that share a minimum and a step: a multiple of 64.
        blocks: Arcs that a message passing layer works on at a time, or ``"auto"``. The edge work
            then runs for one block of destination nodes after another, in forward, in backward
            (where each block is computed again) and in evaluation: no tensor of messages is alive
            for more than a block. At any level; sums come in another order. ``report`` tells
            which layers cannot.
        seed: Seed of the quantization noise, which never touches torch's generators.

    Returns:
        The same ``model``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range, the model has no parameters, or it is wrapped.
    """
    _check_module(model)
    config = Config(
        bits=bits,
        level=level,
        adaptive=adaptive,
        adapt_interval=adapt_interval,
        pin=dict(pin or {}),
        group_size=group_size,
        blocks=blocks,
        seed=seed,
    )
    if next(model.parameters(), None) is None:
        raise ValueError(f"Expected a model with parameters (got {type(model).__name__} with none)")
    for name, module in model.named_modules():
        if _stand_in(module) is not None:
            where = f"its submodule {name!r} is wrapped" if name else "it is wrapped already"
            raise ValueError(
                f"Expected a model that is not wrapped (got {type(model).__name__}: {where}); "
                "call gact_graph.unwrap on it first"
            )
    model.forward = CompressedForward(model, Controller(config, model))
    return model


def unwrap(model: Model) -> Model:
    """Undoes :func:`wrap` and returns the same ``model``; graphs made before still work.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    stand_in = _wrapped(model)
    stand_in.controller.remove_hooks()
    del model.forward
    if stand_in.previous is not None:
        model.forward = stand_in.previous
    return model


def report(model: nn.Module) -> Report:
    """Where the memory of the last compressed forward went: print it, or take ``to_dict()``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    return _wrapped(model).controller.report


def state_dict(model: nn.Module) -> dict[str, Any]:
    """What the library itself must remember to go on: bits by slot, sensitivities, counters.

    Plain numbers, to be saved beside the model's and the optimizer's. What waits to be measured is
    measured first, so that this run and a resumed one go on alike.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    stand_in = _wrapped(model)
    controller = stand_in.controller
    controller.measure(model, stand_in.inner)
    adaptation = controller.adaptation
    return {
        "forwards": controller.forwards,
        "scheme": controller.scheme.state_dict(),
        "adaptation": None if adaptation is None else adaptation.state_dict(),
    }


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Takes over what :func:`state_dict` gave, of a model that was wrapped alike.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped, or ``state`` comes from an adaptive model and this one
            is not, or the other way round.
    """
    controller = _wrapped(model).controller
    adaptive = controller.adaptation is not None
    if adaptive != (state["adaptation"] is not None):
        raise ValueError(
            f"Expected the state of a model with adaptive={adaptive} (got that of one with "
            f"adaptive={not adaptive}); wrap the model as it was when the state was made"
        )
    controller.forwards = state["forwards"]
    controller.scheme.load_state_dict(state["scheme"])
    if controller.adaptation is not None:
        controller.adaptation.load_state_dict(state["adaptation"])


@contextmanager
def compress(model: nn.Module) -> Iterator[None]:
    """Compresses what autograd saves inside the block, for a loop that calls parts of a model.

    .. code-block:: python

        with gact_graph.compress(model):
            z = model.encode(x, edge_index)
            out = model.decode(z, pairs)

    The inputs are not known here, so tensors without history that are handed to a submodule count
    as inputs and are kept by reference. In evaluation mode and under ``no_grad`` nothing happens.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    controller = _wrapped(model).controller
    if not should_compress(model) or controller.session is not None:
        yield
        return
    with controller.capture(model, adopt_inputs=True) as session:
        yield
        session.settle(model, (), ())


def _stand_in(model: nn.Module) -> CompressedForward | None:
    forward = vars(model).get("forward")
    return forward if isinstance(forward, CompressedForward) else None


def _wrapped(model: nn.Module) -> CompressedForward:
    _check_module(model)
    stand_in = _stand_in(model)
    if stand_in is None:
        raise ValueError(
            f"Expected a wrapped model (got a plain {type(model).__name__}); "
            "call gact_graph.wrap on it first"
        )
    return stand_in


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected model to be a torch.nn.Module (got {type(model).__name__})")

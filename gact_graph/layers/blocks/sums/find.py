"""Whether a layer adds up weighted source rows: found by where the values of a tensor go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.layers.blocks import edge_functions
from gact_graph.layers.blocks.arguments import Arguments, Use
from gact_graph.layers.blocks.edge_functions import EdgeFunction, propagate
from gact_graph.layers.blocks.flow import Flow, is_followed
from gact_graph.layers.blocks.sample import Sample
from gact_graph.layers.blocks.sums.products import Products
from gact_graph.layers.blocks.sums.weighted_sum import (
    WeightedSum,
    can_sum,
    is_one_of,
    placeholder,
    weights_of,
)
from gact_graph.support.replica import Snapshot
from gact_graph.support.run_state import RunState

_X = 1
"""The label of the rows' values."""


def find_weighted_sum(
    snapshot: Snapshot, arguments: Arguments, sample: Sample, kept: Sequence[str]
) -> WeightedSum | None:
    """The sum that is the layer's result; None if that is something else.

    Args:
        snapshot: Of the layer.
        arguments: Those of one call.
        sample: A small graph with rows of their tensors.
        kept: Attributes in which the layer leaves a tensor of edges.
    """
    messages = propagate.messages_of(snapshot.parts[0])
    if messages is None:
        return None
    run_state = RunState({t.device.type for t in arguments.tensors})
    with snapshot.replica(own=True) as replica:
        module: Any = replica.module
        for use in arguments.uses:
            x = arguments.tensors[use.index]
            if use.level == "source" and can_sum(x):
                with run_state.restored():
                    number = _message_product(module, messages, sample, use.parameter, kept)
                if number is None:
                    continue
                with run_state.restored(), torch.no_grad():
                    takes_weights = not kept and _takes_weights(
                        module, messages, sample, use, number
                    )
                given, _ = sample.arguments.part(
                    sample.arguments.tensors, sample.order, sample.whole
                )
                given[use.parameter] = placeholder(x, sample.whole.num_edges)
                with run_state.restored(), torch.no_grad(), Products(number) as products:
                    messages(module, given)
                steps = tuple(products.steps)
                return WeightedSum(use.parameter, use.index, messages, number, steps, takes_weights)
    return None


def _message_product(
    module: MessagePassing,
    messages: EdgeFunction,
    sample: Sample,
    parameter: str,
    kept: Sequence[str],
) -> int | None:
    """The number of the product that is the message, if nothing else depends on the parameter."""
    arguments, flow = sample.arguments, Flow()
    learns = [t.is_floating_point() for t in arguments.tensors]
    given, _ = arguments.part(arguments.tensors, sample.order, sample.whole, learns)
    x_j: Tensor = given[parameter]
    flow.label(x_j, _X)
    with flow.followed(), Products() as products:
        out = messages(module, given)
    weight = weights_of(products, out, x_j)
    if weight is None:
        return None
    others = [weight, *(getattr(module, name) for name in kept)]
    if flow.seen & _X or any(flow.of(other) & _X for other in others) or not is_followed(others):
        return None
    return products.count - 1


def _takes_weights(
    module: MessagePassing, messages: EdgeFunction, sample: Sample, use: Use, number: int
) -> bool:
    """Whether the layer is given the weights of edges, so that it can get those of all at once."""
    arguments = sample.arguments
    others = [other for other in arguments.uses if other.parameter != use.parameter]
    if any(other.level not in ("edge", "whole") for other in others):
        return False
    if messages != edge_functions.messages:
        return False  # shares of a mean: how large they are depends on the edges of a node
    given, _ = arguments.all_edges(arguments.tensors, (), use.parameter)
    x_j = placeholder(arguments.tensors[use.index], sample.whole.num_edges)
    if not {*module.inspector.get_flat_param_names(["message"])} <= {*given, use.parameter}:
        return False  # it also asks for indices of nodes, say
    with Products(number) as products:
        out = messages(module, given | {use.parameter: x_j})
    weight = weights_of(products, out, x_j)
    of_edges = [given[other.parameter] for other in others if other.level == "edge"]
    return weight is not None and is_one_of(weight, of_edges)

"""The ways to train one network, side by side: peers, and the library's own.

Each starts from the same weights and drops the same elements, so that all begin with one loss; only
bfloat16 rounds already in forward.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import gact_graph
from datasets import Graph
from experiments.helpers import variants
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.peers import dgl_layers
from experiments.helpers.peers.codecs import RunningRange, WithoutGraphs
from experiments.helpers.peers.counting import saved_bytes
from experiments.helpers.peers.exact import Exact
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.train import seed_everything
from gact_graph.codecs import Drop, register
from gact_graph.ops import cpu
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.storage import tensors_in

MODELS = {
    "gcn": "gcn-edge_index",
    "gat": "gat",
    "gatv2": "gatv2",
    "transformer": "transformer",
    "gcnii": "gcnii",
}
"""Each model's name among :data:`experiments.helpers.subjects.SUBJECTS`."""

_WITHOUT_MESSAGES = {"gcn-edge_index": "gcn"}
"""The same network on a sparse matrix, for schemes that are written for sparse products."""


@dataclass
class Started:
    """A network that is ready to train.

    Attributes:
        model: It.
        task: The graph and the classes.
        forward: Gives the logits [N, C].
        saved_bytes: What the last forward saved for backward, on the device.
    """

    model: nn.Module
    task: NodeTask
    forward: Callable[[], Tensor]
    saved_bytes: Callable[[], int]


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        label: What tables call it.
        start: From a model's name of :data:`SUBJECTS`, a graph, a device and sizes in place of the
            model's own.
        ours: Whether it is the library's.
        missing: Says why it cannot run on a device, or nothing.
        compiles: Whether its first step compiles, which is then no part of its peak.
        rounds_forward: Whether its forward differs from stock's by more than the order of sums.
    """

    label: str
    start: Callable[[str, Graph, torch.device, dict[str, int]], Started]
    ours: bool = False
    missing: Callable[[torch.device], str | None] = lambda device: None
    compiles: bool = False
    rounds_forward: bool = False


def _make(
    name: str, graph: Graph, device: torch.device, sizes: dict[str, int]
) -> tuple[nn.Module, NodeTask]:
    subject = SUBJECTS[name]
    task = prepare(graph, subject.layout, device=device)
    seed_everything(0)
    model = subject.make(task.x.size(1), task.num_classes, **sizes).to(device)
    return model, task


def _started(model: nn.Module, task: NodeTask, context: Callable[[], Any] = nullcontext) -> Started:
    """With each forward inside a context of its own."""

    def forward() -> Tensor:
        with context():
            output: Tensor = model(task.x, task.adjacency)
        return output.float()

    inputs = [*tensors_in((task.x, task.adjacency))]
    return Started(model, task, forward, lambda: saved_bytes(forward, model, inputs))


def _stock(*given: Any) -> Started:
    return _started(*_make(*given))


def _stock_keeping(*given: Any) -> Started:
    """With the memory of freed tensors kept, as it is for wrapped models."""
    cpu.load()
    model, task = _make(*given)

    def step() -> AbstractContextManager[None]:
        memory_policy.start_step(model)
        return nullcontext()

    return _started(model, task, step)


def _compiled(*given: Any) -> Started:
    # Otherwise a compiled network drops other elements than the stock one.
    torch._inductor.config.fallback_random = True
    # What earlier rounds compiled would be no part of the time it takes.
    torch.compiler.config.force_disable_caches = True
    model, task = _make(*given)
    model.compile()
    return _started(model, task)


def _checkpoint(*given: Any) -> Started:
    model, task = _make(*given)
    return _started(variants.apply(model, variants.VARIANTS["checkpoint"], 32, False), task)


def _save_on_cpu(*given: Any) -> Started:
    started = _started(*_make(*given), lambda: save_on_cpu(pin_memory=True))
    started.saved_bytes = lambda: 0
    return started


def _autocast(*given: Any) -> Started:
    model, task = _make(*given)
    return _started(model, task, lambda: torch.autocast(task.x.device.type, torch.bfloat16))


def _exact(block: int, name: str, *given: Any) -> Started:
    model, task = _make(_WITHOUT_MESSAGES.get(name, name), *given)
    mode = Exact(task.x.device, block)
    return _started(model, task, lambda: mode)


def _dgl(name: str, graph: Graph, device: torch.device, sizes: dict[str, int]) -> Started:
    model, task = _make(name, graph, device, sizes)
    edges = prepare(graph, "edge_index").adjacency
    loops = dgl_layers.needs_loops(model)
    adjacency = dgl_layers.make_graph(edges, graph.num_nodes, loops).to(device)
    with torch.random.fork_rng():  # its layers draw weights before they get these
        dgl_layers.replace_layers(model)

    def forward() -> Tensor:
        output: Tensor = model(task.x, adjacency)
        return output

    return Started(model, task, forward, lambda: saved_bytes(forward, model, [task.x]))


def _wrapped(options: dict[str, Any], codec: type[Any] | None, *given: Any) -> Started:
    if codec is not None:
        register(codec(), before=Drop)
    model, task = _make(*given)
    gact_graph.wrap(model, min_bytes=0, **options)
    found = _started(model, task)
    found.saved_bytes = lambda: gact_graph.report(model).stored_bytes
    return found


def _ours(label: str, blocks: str | bool, bits: int, level: str) -> Way:
    exact = level == "lossless"
    options = {"level": level, "bits": bits, "blocks": blocks, "adaptive": not exact}
    return Way(label, functools.partial(_wrapped, options, None), ours=True)


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs CUDA"


def _needs_cpu(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "torch does so on CUDA"
    return None if cpu.load() is not None else "needs a C++ compiler"


def _needs_compiler(device: torch.device) -> str | None:
    if device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return "needs a C++ compiler"


def _needs_dgl(device: torch.device) -> str | None:
    if importlib.util.find_spec("dgl") is None:
        return f"needs DGL: pip install dgl=={dgl_layers.VERSION}"
    return None


_WITHOUT_GRAPHS = {"level": "L1", "bits": 4, "blocks": False, "adaptive": True}
_RUNNING_RANGE = {"level": "L1", "bits": 8, "blocks": False, "adaptive": False}

WAYS = {
    "stock": Way("stock PyG", _stock),
    "stock-kept": Way("stock PyG, freed memory kept", _stock_keeping, missing=_needs_cpu),
    "compiled": Way("torch.compile", _compiled, missing=_needs_compiler, compiles=True),
    "checkpoint": Way("torch's checkpoint, each conv", _checkpoint),
    "save_on_cpu": Way("torch's save_on_cpu", _save_on_cpu, missing=_needs_cuda),
    "bf16": Way("bfloat16 autocast", _autocast, rounds_forward=True),
    "dgl": Way(f"DGL {dgl_layers.VERSION}", _dgl, missing=_needs_dgl),
    "exact": Way("EXACT, 1/8 and 2 bit", functools.partial(_exact, 1)),
    "exact-blocks": Way("EXACT, blocks of 64 rows", functools.partial(_exact, 64)),
    "mesa": Way("Mesa, 8 bit", functools.partial(_wrapped, _RUNNING_RANGE, RunningRange)),
    "gact": Way("GACT, 4 bit", functools.partial(_wrapped, _WITHOUT_GRAPHS, WithoutGraphs)),
    "lossless": _ours("`lossless`", False, 32, "lossless"),
    "lossless+blocks": _ours("`lossless`, blocks", "auto", 32, "lossless"),
    "L1-4+blocks": _ours("`L1` 4 bit, blocks", "auto", 4, "L1"),
    "L1-2+blocks": _ours("`L1` 2 bit, blocks", "auto", 2, "L1"),
    "CB2": _ours("`CB2` 4 bit", "auto", 4, "CB2"),
}

"""Ways to train one network in less memory: the library's levels, and their peers.

All strategies start from the same weights and drop the same elements, so that their first losses
are equal; only bfloat16 rounds already in forward.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

import gact_graph
from datasets import Graph
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.levels import LEVELS_BY_NAME, Level
from experiments.helpers.meters import Trainee, saved_bytes
from experiments.helpers.peers import dgl_layers
from experiments.helpers.peers.codecs import RunningRange, WithoutGraphs
from experiments.helpers.peers.exact import SHARE, Exact
from experiments.helpers.sampling import share_of
from experiments.helpers.subjects import MODELS, make
from experiments.helpers.train import training_loss
from gact_graph.codecs import Drop, register, registered, unregister
from gact_graph.ops import allocator
from gact_graph.support.storage import tensors_in


@dataclass(frozen=True)
class Case:
    """A model on a graph, and the way to train it.

    Attributes:
        model: A name of :data:`experiments.helpers.subjects.MODELS`.
        strategy: A name of :data:`STRATEGIES`.
        dataset: As ``--dataset`` takes it.
        data_root: The folder of named data sets.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        steps: Training steps; the first is not counted in the times.
        bits: Bits of the levels that quantize, if the strategy names none.
        adaptive: Whether bits are spent by sensitivity.
        hidden, layers: In place of the model's own (the width of a head, for attention).
        norm, act, dropout: The same, of a model of :data:`experiments.helpers.subjects.BASIC`.
        cap_bytes: Memory beyond what the process has before the first step, as
            :func:`experiments.helpers.process.set_cap` counts it.
        allocator: A name of :data:`experiments.helpers.process.ALLOCATORS`; None for that of the
            strategy.
        parts: Processes, each with a part of the graph; 0 takes the graph whole.
        cut: One of :data:`experiments.helpers.sampling.PARTITIONS`.
        halo_bits: Bits of an element that is sent to another process.
        threads: Threads of each process; None leaves that to the environment.
        rank: The number of the part that this process trains.
    """

    model: str
    strategy: str
    dataset: str
    data_root: str = "data"
    device: str = "cpu"
    steps: int = 4
    bits: int = 4
    adaptive: bool = False
    hidden: int | None = None
    layers: int | None = None
    norm: str | None = None
    act: str | None = None
    dropout: float | None = None
    cap_bytes: int | None = None
    allocator: str | None = None
    parts: int = 0
    cut: str = "metis"
    halo_bits: int = 32
    threads: int | None = None
    rank: int = 0

    @classmethod
    def of(cls, args: Any, **more: Any) -> Case:
        """Return a case with the flags of a command that have the names of its attributes."""
        names = {field.name for field in fields(cls)}
        flags = {name: value for name, value in vars(args).items() if name in names} | more
        for name in flags.keys() & {"data_root", "device"}:
            flags[name] = str(flags[name])
        return cls(**flags)

    @property
    def changes(self) -> dict[str, Any]:
        """Return arguments of the model in place of its own."""
        names = ("hidden", "layers", "norm", "act", "dropout")
        asked = {name: getattr(self, name) for name in names}
        return {name: value for name, value in asked.items() if value is not None}


_WITHOUT_MESSAGES = {"gcn-edge_index": "gcn"}
"""The same network on a sparse matrix, for schemes that are written for sparse products."""


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        label: Its name in tables.
        start: Makes a trainee of a case, its graph and a device.
        ours: Whether it is the library's.
        missing: Returns the reason why it cannot run on a device, or None.
        compiles: Whether its first step compiles, and does not count in its peak.
        rounds_forward: Whether its forward differs from stock's by more than the order of sums.
        bits: Bits of an element, if the case does not choose them.
        allocator: The allocator of its process on a CPU, if the case has no other.
    """

    label: str
    start: Callable[[Case, Graph, torch.device], Trainee]
    ours: bool = False
    missing: Callable[[torch.device], str | None] = lambda device: None
    compiles: bool = False
    rounds_forward: bool = False
    bits: int | None = None
    allocator: str = "kept"


def _trainee(model: nn.Module, task: NodeTask, context: Callable[[], Any] = nullcontext) -> Trainee:
    """Return a trainee with each forward inside a context of its own."""

    def forward() -> Tensor:
        with context():
            output: Tensor = model(task.x, task.adjacency)
        return output.float()

    inputs = [*tensors_in((task.x, task.adjacency))]
    return _of_forward(model, task, forward, inputs)


def _of_forward(
    model: nn.Module, task: NodeTask, forward: Callable[[], Tensor], inputs: list[Tensor]
) -> Trainee:
    return Trainee(
        model,
        lambda: training_loss(forward(), task),
        task.x.device,
        lambda: saved_bytes(forward, model, inputs),
        part=task.part,
    )


def _make(
    case: Case, graph: Graph, device: torch.device, name: str | None = None
) -> tuple[nn.Module, NodeTask]:
    subject = MODELS[name or case.model]
    task = prepare(graph, subject.layout, device=device)
    return make(subject, task, **case.changes), task


def _stock(*start: Any) -> Trainee:
    return _trainee(*_make(*start))


def _compiled(*start: Any) -> Trainee:
    # Otherwise a compiled network drops other elements than the stock one.
    torch._inductor.config.fallback_random = True
    # Code that an earlier round compiled would not count in the time.
    torch.compiler.config.force_disable_caches = True
    model, task = _make(*start)
    model.compile()
    return _trainee(model, task)


def _checkpoint(*start: Any) -> Trainee:
    model, task = _make(*start)
    return _trainee(checkpoint_layers(model), task)


def checkpoint_layers(model: nn.Module) -> nn.Module:
    """Compute each message passing layer again in backward, by torch's own checkpoint."""
    for module in model.modules():
        if isinstance(module, MessagePassing):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return model


def _save_on_cpu(*start: Any) -> Trainee:
    trainee = _trainee(*_make(*start), lambda: save_on_cpu(pin_memory=True))
    trainee.saved_bytes = lambda: 0
    return trainee


def _autocast(*start: Any) -> Trainee:
    model, task = _make(*start)
    return _trainee(model, task, lambda: torch.autocast(task.x.device.type, torch.bfloat16))


def _exact(
    case: Case, graph: Graph, device: torch.device, block: int = 1, share: int = SHARE
) -> Trainee:
    name = _WITHOUT_MESSAGES.get(case.model, case.model)
    model, task = _make(case, graph, device, name)
    mode = Exact(task.x.device, block, share=share)
    trainee = _trainee(model, task, lambda: mode)
    others = trainee.saved_bytes

    def saved() -> int:
        mode.nbytes = 0
        return others() + mode.nbytes

    trainee.saved_bytes = saved
    return trainee


def _dgl(case: Case, graph: Graph, device: torch.device) -> Trainee:
    model, task = _make(case, graph, device)
    edges = prepare(graph, "edge_index").adjacency
    loops = dgl_layers.needs_loops(model)
    adjacency = dgl_layers.make_graph(edges, graph.num_nodes, loops).to(device)
    with torch.random.fork_rng():  # DGL's layers draw weights before they get these
        dgl_layers.replace_layers(model)

    def forward() -> Tensor:
        output: Tensor = model(task.x, adjacency)
        return output

    return _of_forward(model, task, forward, [task.x])


def _wrapped(
    level: Level, codec: type[Any] | None, case: Case, graph: Graph, device: torch.device
) -> Trainee:
    if codec is not None:
        register(codec(), before=Drop)
    more: dict[str, Any] = {}
    model, task = _make(case, graph, device)
    if case.parts:
        task = share_of(task, case.cut, case.rank, case.parts)
        more = {"partition": task.part, "halo_bits": case.halo_bits}
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # so that the losses of any number of parts can be compared
    level.wrap(model, case.bits, case.adaptive, **more)
    trainee = _trainee(model, task)
    trainee.wrapped, trainee.saved_bytes = True, lambda: gact_graph.report(model).stored_bytes
    return trainee


@contextmanager
def registry_restored() -> Iterator[None]:
    """Unregister the codecs of a peer on exit."""
    before = registered()
    try:
        yield
    finally:
        for codec in {*registered()} - {*before}:
            unregister(codec)


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs CUDA"


def _needs_cpu(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "torch does so on CUDA"
    return None if allocator.load() is not None else "needs a C++ compiler"


def _needs_compiler(device: torch.device) -> str | None:
    if device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return "needs a C++ compiler"


def _needs_dgl(device: torch.device) -> str | None:
    if importlib.util.find_spec("dgl") is None:
        return f"needs DGL: pip install dgl=={dgl_layers.VERSION}"
    return None


def _fed(
    label: str, start: Callable[[Case, Graph, torch.device], Trainee], **more: Any
) -> Strategy:
    """Return a peer under jemalloc without decay, which keeps freed memory as the library does."""
    return Strategy(f"{label}, jemalloc", start, allocator="jemalloc-tuned", **more)


_DGL = f"DGL {dgl_layers.VERSION}"

STRATEGIES = {
    "stock": Strategy("stock PyG", _stock),
    "stock-jemalloc": _fed("stock PyG", _stock, missing=_needs_cpu),
    "compiled": _fed("torch.compile", _compiled, missing=_needs_compiler, compiles=True),
    "checkpoint": _fed("torch's checkpoint, each conv", _checkpoint),
    "save_on_cpu": Strategy("torch's save_on_cpu", _save_on_cpu, missing=_needs_cuda),
    "bf16": _fed("bfloat16 autocast", _autocast, rounds_forward=True),
    "dgl": Strategy(_DGL, _dgl, missing=_needs_dgl),
    "dgl-jemalloc": _fed(_DGL, _dgl, missing=_needs_dgl),
    "exact": _fed("EXACT, 1/8 and 2 bit", _exact, bits=2),
    "exact-wide": _fed("EXACT, 2 bit", functools.partial(_exact, share=1), bits=2),
    "exact-blocks": _fed("EXACT, blocks of 64 rows", functools.partial(_exact, block=64), bits=2),
    "mesa": Strategy(
        "Mesa, 8 bit",
        functools.partial(_wrapped, Level("L1", bits=8, adaptive=False), RunningRange),
        bits=8,
    ),
    "gact": Strategy("GACT, 4 bit", functools.partial(_wrapped, Level("L1"), WithoutGraphs)),
    **{
        name: Strategy(
            f"{level.label} 4 bit" if name == "CB2" else level.label,
            functools.partial(_wrapped, level, None),
            ours=True,
        )
        for name, level in LEVELS_BY_NAME.items()
    },
}

LABELS = {name: strategy.label for name, strategy in STRATEGIES.items()} | {"CB2": "`CB2`"}
"""Labels of strategies, in tables whose captions name the bits."""

PEERS = (
    *("stock", "stock-jemalloc", "compiled", "checkpoint", "save_on_cpu", "bf16"),
    *("dgl", "dgl-jemalloc", "exact", "exact-blocks", "mesa", "gact"),
    *("8GB", "lossless", "lossless+blocks", "L1-4+blocks", "L1-2+blocks", "CB2"),
)
"""Strategies of ``experiments.peers``, in the order of its table."""

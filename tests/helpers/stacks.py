"""Random stacks of message passing layers on random graphs, as programs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Draw = Any


@dataclass(frozen=True)
class Layer:
    """A layer as source.

    Attributes:
        make: Its constructor. ``{i}`` and ``{o}`` are input and output channels, ``{c}`` is half
            the output (for two heads, concatenated), ``{more}`` takes what every layer does.
        call: What is handed over; ``{x}`` are features. Of a graph there are ``e`` (edges), ``w`` a
            weight, ``a`` three attributes, ``t`` the type of each edge, ``pos`` and ``x0`` of each
            node, ``k`` the type of each node and ``batch``.
        pair: The same for ``({x}, {y})``, sources and destinations; None if it takes no pair.
        lazy: Whether the input channels may be -1.
        draws: Whether it draws random numbers by edge, for which blocks take another order.
    """

    make: str
    call: str = "{x}, e"
    pair: str | None = None
    lazy: bool = False
    draws: bool = False


def _mlp(inputs: str, outputs: str) -> str:
    return f"nn.Sequential(nn.Linear({inputs}, 8), nn.Tanh(), nn.Linear(8, {outputs}))"


_PAIR = "({x}, {y}), e"

AGGREGATIONS = (
    "'mean'",
    "'sum'",
    "'max'",
    "'min'",
    "'std'",
    "'var'",
    "'median'",
    "['mean', 'max', 'std']",
    "pyg.SoftmaxAggregation(learn=True)",
    "pyg.PowerMeanAggregation(learn=True)",
)

LAYERS: tuple[Layer, ...] = (
    Layer("pyg.GCNConv({i}, {o}{more})", lazy=True),
    Layer("pyg.GCNConv({i}, {o}{more})", "{x}, e, w", lazy=True),
    Layer("pyg.GCNConv({i}, {o}, cached=True{more})", lazy=True),
    Layer("pyg.GCNConv({i}, {o}, normalize=False, bias=False{more})", "{x}, e, w"),
    Layer("pyg.ChebConv({i}, {o}, K=3{more})", lazy=True),
    Layer("pyg.SAGEConv({i}, {o}, aggr={aggr}{more})", pair=_PAIR, lazy=True),
    Layer("pyg.SAGEConv({i}, {o}, aggr={aggr}, project=True{more})", pair=_PAIR),
    Layer("pyg.SAGEConv({i}, {o}, normalize=True, root_weight=False{more})", pair=_PAIR, lazy=True),
    Layer("pyg.SAGEConv({i}, {o}, aggr='lstm'{more})", pair=_PAIR),
    Layer("pyg.GraphConv({i}, {o}, aggr={simple}{more})", "{x}, e, w", _PAIR + ", w"),
    Layer("pyg.GraphConv({i}, {o}{more})", pair=_PAIR, lazy=True),
    Layer("pyg.GatedGraphConv({o}, 2{more})", "{x}, e, w"),
    Layer("pyg.ResGatedGraphConv({i}, {o}{more})", pair=_PAIR, lazy=True),
    Layer("pyg.ResGatedGraphConv({i}, {o}, edge_dim=3{more})", "{x}, e, a", _PAIR + ", a"),
    Layer("pyg.GATConv({i}, {c}, heads=2{more})", lazy=True),
    Layer("pyg.GATConv({i}, {o}, add_self_loops=False{more})", pair=_PAIR, lazy=True),
    Layer("pyg.GATConv({i}, {c}, heads=2, edge_dim=3{more})", "{x}, e, a"),
    Layer(
        "pyg.GATConv({i}, {o}, heads=2, concat=False, edge_dim=3, add_self_loops=False{more})",
        "{x}, e, a",
        _PAIR + ", a",
    ),
    Layer("pyg.GATConv({i}, {c}, heads=2, dropout=0.4{more})", draws=True),
    Layer("pyg.GATConv({i}, {o}, residual=True{more})"),
    Layer("pyg.GATv2Conv({i}, {c}, heads=2{more})", lazy=True),
    Layer(
        "pyg.GATv2Conv({i}, {o}, add_self_loops=False, edge_dim=3{more})",
        "{x}, e, a",
        _PAIR + ", a",
    ),
    Layer("pyg.GATv2Conv({i}, {o}, add_self_loops=False, share_weights=True{more})", pair=_PAIR),
    Layer("pyg.GATv2Conv({i}, {o}, dropout=0.4{more})", draws=True),
    Layer("pyg.TransformerConv({i}, {c}, heads=2{more})", pair=_PAIR, lazy=True),
    Layer("pyg.TransformerConv({i}, {o}, edge_dim=3, beta=True{more})", "{x}, e, a", _PAIR + ", a"),
    Layer("pyg.TransformerConv({i}, {o}, dropout=0.4{more})", draws=True),
    Layer("pyg.AGNNConv({more})"),
    Layer("pyg.TAGConv({i}, {o}, K=2{more})", "{x}, e, w"),
    Layer(f"pyg.GINConv({_mlp('{i}', '{o}')}, train_eps=True{{more}})", pair=_PAIR),
    Layer(f"pyg.GINEConv({_mlp('{i}', '{o}')}, edge_dim=3{{more}})", "{x}, e, a", _PAIR + ", a"),
    Layer("pyg.ARMAConv({i}, {o}, num_stacks=2, num_layers=2{more})", "{x}, e, w", lazy=True),
    Layer("pyg.SGConv({i}, {o}, K=2{more})", "{x}, e, w"),
    Layer("pyg.SGConv({i}, {o}, K=2, cached=True{more})", lazy=True),
    Layer("pyg.SSGConv({i}, {o}, alpha=0.1, K=2{more})", lazy=True),
    Layer("pyg.SSGConv({i}, {o}, alpha=0.1, K=2, cached=True{more})"),
    Layer("pyg.APPNP(K=3, alpha=0.1{more})", "{x}, e, w"),
    Layer("pyg.APPNP(K=2, alpha=0.2, cached=True{more})"),
    Layer("pyg.MFConv({i}, {o}, max_degree=3{more})", pair=_PAIR),
    Layer("pyg.RGCNConv({i}, {o}, 3, aggr={simple}{more})", "{x}, e, t", _PAIR + ", t"),
    Layer("pyg.RGCNConv({i}, {o}, 3, num_bases=2{more})", "{x}, e, t", _PAIR + ", t"),
    Layer("pyg.RGCNConv({i}, {o}, 3, num_blocks=2{more})", "{x}, e, t"),
    Layer("pyg.FastRGCNConv({i}, {o}, 3{more})", "{x}, e, t", _PAIR + ", t"),
    Layer("pyg.RGATConv({i}, {o}, 3{more})", "{x}, e, t"),
    Layer("pyg.RGATConv({i}, {o}, 3, mod='additive', edge_dim=3{more})", "{x}, e, t, a"),
    Layer("pyg.RGATConv({i}, {o}, 3, attention_mechanism='within-relation'{more})", "{x}, e, t"),
    Layer("pyg.SignedConv({i}, {c}, first_aggr=True{more})", "{x}, e, e.flip(0)", pair=None),
    Layer("pyg.GMMConv({i}, {o}, dim=3, kernel_size=2{more})", "{x}, e, a", _PAIR + ", a"),
    Layer(
        f"pyg.NNConv({{i}}, {{o}}, {_mlp('3', '{i} * {o}')}{{more}})", "{x}, e, a", _PAIR + ", a"
    ),
    Layer("pyg.CGConv({o}, dim=3, batch_norm=True{more})", "{x}, e, a"),
    Layer(f"pyg.EdgeConv({_mlp('2 * {i}', '{o}')}, aggr={{simple}}{{more}})", pair=_PAIR),
    Layer(f"pyg.PointNetConv({_mlp('{i} + 3', '{o}')}{{more}})", "{x}, pos, e"),
    Layer(f"pyg.PPFConv({_mlp('{i} + 4', '{o}')}{{more}})", "{x}, pos, F.normalize(pos), e"),
    Layer("pyg.PointTransformerConv({i}, {o}{more})", "{x}, pos, e"),
    Layer("pyg.FeaStConv({i}, {o}, heads=2{more})", lazy=True),
    Layer("pyg.HypergraphConv({i}, {o}{more})"),
    Layer("pyg.LEConv({i}, {o}{more})", "{x}, e, w", _PAIR + ", w"),
    Layer(
        "pyg.PNAConv({i}, {o}, ['mean', 'min', 'max', 'std'], ['identity', 'amplification'],"
        " deg=torch.tensor([1, 2, 3, 2]){more})"
    ),
    Layer("pyg.ClusterGCNConv({i}, {o}{more})", lazy=True),
    Layer("pyg.GENConv({i}, {o}, learn_t=True, norm='layer'{more})", pair=_PAIR, lazy=True),
    Layer("pyg.GENConv({i}, {o}, aggr='powermean', learn_p=True, edge_dim=3{more})", "{x}, e, a"),
    Layer("pyg.GCN2Conv({o}, alpha=0.1, theta=0.5, layer=1{more})", "{x}, x0, e, w"),
    Layer("pyg.GCN2Conv({o}, alpha=0.1, cached=True{more})", "{x}, x0, e"),
    Layer("pyg.FiLMConv({i}, {o}, num_relations=3{more})", "{x}, e, t", _PAIR + ", t"),
    Layer("pyg.FiLMConv({i}, {o}{more})", pair=_PAIR, lazy=True),
    Layer("pyg.SuperGATConv({i}, {c}, heads=2, is_undirected=True{more})", draws=True),
    Layer("pyg.FAConv({o}{more})", "{x}, x0, e"),
    Layer("pyg.EGConv({i}, {o}, ['mean', 'max', 'symnorm'], num_heads=2, num_bases=2{more})"),
    Layer("pyg.PDNConv({i}, {o}, edge_dim=3, hidden_channels=4{more})", "{x}, e, a"),
    Layer(
        "pyg.GeneralConv({i}, {o}, in_edge_channels=3, attention=True, heads=2{more})", "{x}, e, a"
    ),
    Layer("pyg.GeneralConv({i}, {o}, skip_linear=True{more})", pair=_PAIR),
    Layer("pyg.HEATConv({i}, {o}, 2, 3, 4, 3, 4{more})", "{x}, e, k, t, a"),
    Layer("pyg.LGConv({more})", "{x}, e, w"),
    Layer("pyg.SimpleConv(aggr={simple}, combine_root='sum'{more})", "{x}, e, w"),
    Layer("pyg.SimpleConv(aggr='mul'{more})"),
    Layer("pyg.AntiSymmetricConv({o}, num_iters=2)"),
    Layer("pyg.DirGNNConv(pyg.SAGEConv({i}, {o}))"),
    Layer("pyg.MixHopConv({i}, {c}, powers=[0, 2]{more})", "{x}, e, w"),
    Layer(
        f"pyg.GPSConv({{o}}, pyg.GINConv({_mlp('{i}', '{o}')}), heads=2)",
        "{x}, e, batch",
    ),
    Layer("pyg.WLConvContinuous({more})", "{x}, e, w"),
)

# What a user's own message may be made of: one line each, with the last result as ``m``.
MESSAGES = (
    "m = torch.sigmoid((m * self.att).sum(-1, keepdim=True)) * m",
    "m = torch.where(m > {number}, m * 2, m)",
    "m = torch.where(m > {number}, m, x_i)",
    "m = m * x_i",
    "m = m - x_i.tanh()",
    "m = self.lin(m).relu()",
    "m = torch.cat([m, x_i], dim=-1) @ self.mix",
    "m = m * w.view(-1, 1)",
    "m = m * softmax((m * x_i).sum(-1), index, ptr, size_i).view(-1, 1)",
    "m = m.exp().clamp(max=9.0)",
    "m = m / (1.0 + m.abs())",
    "m = m.masked_fill(m < {number}, 0.0)",
    "m = F.normalize(m, dim=-1)",
    "m = m.clone().mul_(self.att)",
    "m = m * self.hops",
    "m = m.chunk(2, -1)[0].repeat(1, 2)",
    "m = m.detach() * x_j.mean(-1, keepdim=True) + m",
    "m = F.layer_norm(m, m.shape[-1:])",
    "m = F.leaky_relu(m, 0.2, inplace={flag})",
    "m = m.pow(2) * 0.5",
    "m = m if {flag} else m.cumsum(-1)",
    "m = m * m.sign()",
    "m = m.topk({o}, dim=-1).values",
    "m = m * torch.ones_like(m[:1])",
)

# What a message may count in besides.
STATES = (
    "m = m * self.state.next()",
    "m = m * type(self).next_of_class()",
    "m = m * self.count()",
    "m = m * of_global()",
    "m = m * of_closure()",
    "m = m + torch.randn((), generator=self.generator)",
    "m = m * float(self.rng.random())",
    "m = m * next(self.items)",
    "m = m * self.tick()",
)

# What depends on the edges of other destinations: no part of the edges gives the same.
ELSEWHERE = (
    "m = m / torch.bincount(edge_index_j, minlength=size_j)[edge_index_j].view(-1, 1)",
    "m = m * softmax(m.sum(-1), edge_index_j).view(-1, 1)",
    "m = m + torch.arange(m.size(0)).view(-1, 1) * 0.1",
    "m = m + m.cumsum(0) * 0.1",
    "m = m - m.mean(0, keepdim=True)",
    "m = m - m.median(0).values",
    "m = m * 2 if m.size(0) > 50 else m",
)

BETWEEN = (
    "{h}.relu()",
    "F.elu({h})",
    "F.leaky_relu({h}, 0.1)",
    "F.gelu({h})",
    "F.silu({h})",
    "torch.tanh({h})",
    "F.dropout({h}, 0.4, self.training)",
    "F.layer_norm({h}, {h}.shape[-1:])",
    "F.normalize({h}, dim=-1)",
    "{h} * 3.0",
    "-{h}",
    "{h}.clone().relu_()",
    "F.hardtanh({h})",
    "F.softplus({h})",
    "{h}.softmax(-1)",
)
NORMS = ("pyg.BatchNorm({o})", "pyg.GraphNorm({o})", "pyg.PairNorm()", "nn.PReLU()")

SIMPLE = ("'sum'", "'mean'", "'max'", "'min'")

PREAMBLE = '''\
import numpy
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.utils import softmax

torch.set_default_dtype(torch.{dtype})


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def edges(seed, count, source, destination):
    """From nodes in one range to nodes in another."""
    made = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(*r, (count,), generator=made) for r in (source, destination)])


def kinds(seed, count, most):
    return torch.randint(most, (count,), generator=torch.Generator().manual_seed(seed))


CALLS = 0


def of_global():
    global CALLS
    CALLS += 1
    return 1 + CALLS % 7


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return 1 + calls % 5

    return count


of_closure = counter()


class State:
    calls = 0

    def next(self):
        self.calls += 1
        return 1 + self.calls % 3


def finish(model, record, backward, outputs, **inputs):
    """Ends a step, with a kind of ``backward``."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    record += [("output", out.detach().clone()) for out in outputs]
    losses = [(out * normal(90 + i, *out.shape)).sum() for i, out in enumerate(outputs)]
    if backward == "twice":
        sum(losses).backward(retain_graph=True)
        sum(losses).backward()
    elif backward == "one by one":
        for loss in losses:
            loss.backward(retain_graph=True)
    elif backward == "second":
        leaves = [t for t in (*model.parameters(), *inputs.values()) if t.requires_grad]
        found_at = torch.autograd.grad(
            sum(out.square().sum() for out in outputs) + sum(losses),
            leaves, create_graph=True, allow_unused=True,
        )
        found_at = [(i, g) for i, g in enumerate(found_at) if g is not None]
        record += [(f"derivative {i}", g.detach().clone()) for i, g in found_at]
        reached = [(g * normal(70 + i, *g.shape)).sum() for i, g in found_at if g.requires_grad]
        if reached:
            sum(reached).backward()
    elif backward == "first":
        losses[0].backward()
    elif backward == "grad":
        given = [p for p in model.parameters() if p.requires_grad]
        for p, g in zip(given, torch.autograd.grad(sum(losses), given, allow_unused=True)):
            p.grad = g
    elif backward == "once":
        sum(losses).backward()
    for name, p in [*model.named_parameters(), *inputs.items()]:
        if p.grad is not None:
            record.append((f"gradient of {name}", p.grad.clone()))
    record += [(f"buffer {name}", b.clone()) for name, b in model.named_buffers()]
    with torch.no_grad():
        for p in model.parameters():  # not by the gradient, of which noise would grow
            p.mul_(0.95)
    model.zero_grad()
'''


@dataclass
class Stack:
    """A drawn program."""

    source: str
    blocks: int | None


@dataclass
class _Net:
    made: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def _own_layer(draw: Draw, number: int, kinds: tuple[str, ...]) -> str:
    """A user's own message passing layer, with a line of ``kinds`` in its message."""
    lines = draw(st.lists(st.sampled_from(MESSAGES), min_size=0 if kinds else 1, max_size=3))
    if kinds:
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(kinds)))
    fill = {"number": draw(st.sampled_from(["0.0", "1.5", "-1.0"])), "flag": draw(st.booleans())}
    message = "\n        ".join(line.format(o="self.width", **fill) for line in lines)
    aggregation = draw(st.sampled_from((*SIMPLE, "'std'", "['sum', 'max']")))
    factor = 2 if "[" in aggregation else 1
    loop = draw(st.sampled_from([1, 1, 2]))
    return textwrap.dedent(f"""\
        class Own{number}(pyg.MessagePassing):
            def __init__(self, width, **options):
                super().__init__(aggr={aggregation}, **options)
                self.width, self.hops = width, 1
                self.lin, self.out = nn.Linear(width, width), nn.Linear({factor} * width, width)
                self.att = nn.Parameter(normal(7, width))
                self.mix = nn.Parameter(normal(8, 2 * width, width))
                self.state, self.count = State(), counter()
                self.generator = torch.Generator().manual_seed(3)
                self.rng, self.items = numpy.random.default_rng(3), iter(range(1, 10**6))
                self.ticks = numpy.zeros(1)

            calls = 0

            @classmethod
            def next_of_class(cls):
                cls.calls += 1
                return 1 + cls.calls % 3

            def tick(self):
                self.ticks += 1
                return float(1 + self.ticks[0] % 4)

            def forward(self, x, e, w):
                for self.hops in range(1, {loop + 1}):
                    x = self.out(self.propagate(e, x=x, w=w))
                return x

            def message(self, x_i, x_j, w, index, ptr, size_i, size_j, edge_index_j):
                m = x_j
                {{message}}
                return m


        """).replace("{message}", message.replace("\n        ", "\n" + " " * 8))


@st.composite
def stacks(draw: Draw, kinds: tuple[str, ...] = (), second: bool = False) -> Stack:
    """A net of one to three layers, and one to three steps on graphs of its kind.

    Args:
        kinds: Lines of which the messages of each layer have one: :data:`STATES` or
            :data:`ELSEWHERE`. All layers are a user's own then.
        second: Whether gradients are differentiated once more, in float64.
    """
    bipartite = not kinds and draw(st.booleans()) and draw(st.booleans())
    width = draw(st.sampled_from([4, 4, 8, 64]))
    blocks = draw(st.sampled_from([None, 2, 5, 16, 40]))
    dtype = draw(st.sampled_from(["float64", "float64", "float64", "float32"]))
    dtype = "float64" if second else dtype
    net = _Net()
    count = draw(st.integers(1, 3))
    outputs = ["h"]
    shared: list[tuple[str, str]] = []
    for number in range(count):
        again = shared and draw(st.integers(0, 4)) == 0
        if again:
            name, call = draw(st.sampled_from(shared))
        else:
            name, call = (
                f"self.conv{number}",
                _layer(draw, net, number, width, bipartite, blocks, kinds),
            )
        call = call.format(x="h", y="y")
        if bipartite:
            # There and back again: what were destinations are sources then.
            net.body.append(f"h, y = {name}({call}), h")
            net.body.append("e = e.flip(0)")
        else:
            net.body.append(f"h = {name}({call})")
        if not again:
            shared.append((name, call))
        for _ in range(draw(st.integers(0, 2))):
            _between(draw, net, width)
        if draw(st.integers(0, 4)) == 0:
            net.body.append(f"h{number} = h")
            outputs.append(f"h{number}")
    net.made.append(f"self.last = nn.Linear({width}, 3)")
    net.body.append("h = self.last(h)")
    result = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    source = PREAMBLE.replace("{dtype}", dtype)
    source += "\n\n" + "".join(net.classes)
    source += "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "".join(f"        {line}\n" for line in net.made)
    arguments = "h, y, e, w, a, t, pos, x0, k, batch"
    source += f"\n    def forward(self, {arguments}):\n"
    source += "".join(f"        {line}\n" for line in net.body) + f"        return {result}\n"
    source += "\n\ndef build():\n    global CALLS, of_closure\n"
    source += "    CALLS, of_closure = 0, counter()\n"
    source += "".join(f"    {name}.calls = 0\n" for name in net.own)
    source += "    return Net()\n\n\ndef train(model, record):\n"
    steps = draw(st.integers(1, 3))
    graph: list[str] = []
    for step in range(steps):
        if step == 0 or draw(st.booleans()):
            graph = _graph(draw, width, bipartite, step)
        source += "".join(f"    {line}\n" for line in graph)
        source += "".join(f"    {line}\n" for line in _step(draw, second))
    return Stack(source, blocks)


def _layer(
    draw: Draw,
    net: _Net,
    number: int,
    width: int,
    bipartite: bool,
    blocks: int | None,
    kinds: tuple[str, ...],
) -> str:
    flow = draw(st.booleans()) and draw(st.booleans())
    flow = flow and not bipartite
    more = ", flow='target_to_source'" if flow else ""
    if kinds or (not bipartite and draw(st.integers(0, 5)) == 0):
        net.classes.append(_own_layer(draw, number, kinds))
        net.own.append(f"Own{number}")
        net.made.append(f"self.conv{number} = Own{number}({width}{more})")
        return "{x}, e, w"
    fits = [
        layer
        for layer in LAYERS
        if (not bipartite or layer.pair is not None) and (blocks is None or not layer.draws)
    ]
    layer = draw(st.sampled_from(fits))
    lazy = layer.lazy and draw(st.integers(0, 2)) == 0
    inputs = "-1" if lazy else str(width)
    if bipartite and layer.pair is not None and "GINE" not in layer.make:
        pairs = ("SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv", "GENConv")
        others = ("ResGatedGraphConv", "GMMConv", "NNConv", "FiLMConv", "GeneralConv", "RGCNConv")
        if any(name in layer.make for name in (*pairs, *others, "LEConv")):
            inputs = f"({inputs}, {inputs})"
    if "AGNN" in layer.make or layer.make.startswith(("pyg.LGConv", "pyg.WL")):
        more = more.removeprefix(", ")
    made = layer.make.format(
        i=inputs,
        o=width,
        c=width // 2,
        more=more,
        aggr=draw(st.sampled_from(AGGREGATIONS)) if "{aggr}" in layer.make else "",
        simple=draw(st.sampled_from(SIMPLE)) if "{simple}" in layer.make else "",
    )
    net.made.append(f"self.conv{number} = {made}")
    call = layer.pair if bipartite else layer.call
    assert call is not None
    return call


def _between(draw: Draw, net: _Net, width: int) -> None:
    if draw(st.integers(0, 3)) == 0:
        name = f"self.norm{len(net.made)}"
        net.made.append(f"{name} = {draw(st.sampled_from(NORMS)).format(o=width)}")
        net.body.append(f"h = {name}(h)")
    else:
        net.body.append(f"h = {draw(st.sampled_from(BETWEEN)).format(h='h')}")


def _graph(draw: Draw, width: int, bipartite: bool, step: int) -> list[str]:
    """Features, edges and all that goes with them."""
    seed = 10 * step
    rows = draw(st.sampled_from([12, 30, 5, 12, 30, 1]))
    columns = draw(st.sampled_from([rows, 12, 30, 4])) if bipartite else rows
    count = draw(st.sampled_from([0, 1, 3, 20, 60, 60, 150]))
    source = _range(draw, rows)
    destination = _range(draw, columns)
    lines = [
        f"x = normal({seed}, {rows}, {width})",
        f"y = normal({seed + 1}, {columns}, {width})",
        f"e = edges({seed + 2}, {count}, {source}, {destination})",
    ]
    form = draw(
        st.sampled_from(
            ["", "", "", "sorted", "loops", "twice", "strided", "columns", "EdgeIndex", "int32"]
        )
    )
    lines += {
        "": [],
        "sorted": ["e = e[:, e[1].argsort(stable=True)]"],
        "loops": [f"e = torch.cat([e, torch.arange({min(rows, columns)}).repeat(2, 1)], 1)"],
        "twice": ["e = torch.cat([e, e], 1)"],
        "int32": ["e = e.int()"],
        "strided": ["e = torch.cat([e, e], 1)[:, ::2]"],
        "columns": ["e = e.t().contiguous().t()"],
        "EdgeIndex": [f"e = EdgeIndex(e, sparse_size=({rows}, {columns}))"],
    }[form]
    shape = draw(st.sampled_from(["", "", "", "columns", "wide", "row"]))
    lines += {
        "": [],
        "columns": ["x = x.t().contiguous().t()"],
        "wide": ["x = torch.cat([x, x], 1)[:, ::2]"],
        "row": ["x = x[:1].expand_as(x)"],
    }[shape]
    scale = draw(st.sampled_from(["", "", "", "x = x * 50", "x = -x", "x = x.abs()", "x = x * 0"]))
    lines += [scale] if scale else []
    lines += [
        f"m = e.size(1)  # {count} edges" if not form else "m = e.size(1)",
        f"w, a, t = normal({seed + 3}, m).abs(), normal({seed + 4}, m, 3), kinds({seed + 5}, m, 3)",
        f"pos, x0 = normal({seed + 6}, {rows}, 3), normal({seed + 7}, {rows}, {width})",
        f"k, batch = kinds({seed + 8}, {rows}, 2), kinds({seed + 9}, {rows}, 3).sort().values",
    ]
    learns = draw(st.lists(st.sampled_from(["x", "y", "w", "a", "pos"]), max_size=2, unique=True))
    lines += [f"{name} = {name}.detach().requires_grad_()" for name in learns]
    if draw(st.integers(0, 5)) == 0:
        lines.append("w = torch.ones_like(w)")
    inputs = ", ".join(f"{name}={name}" for name in learns)
    lines.append(f"inputs = dict({inputs})")
    return lines


def _range(draw: Draw, count: int) -> tuple[int, int]:
    """All nodes, or some of them."""
    part = draw(st.sampled_from(["all", "all", "low", "high", "one"]))
    half = max(1, count // 2)
    return {
        "all": (0, count),
        "low": (0, half),
        "high": (count - half, count),
        "one": (count - 1, count),
    }[part]


def _step(draw: Draw, second: bool) -> list[str]:
    call = "model(x, y, e, w, a, t, pos, x0, k, batch)"
    kind = draw(st.sampled_from(["train", "train", "train", "train", "eval", "no_grad"]))
    if kind == "no_grad":
        return [
            "model.train()",
            "with torch.no_grad():",
            f"    out = {call}",
            "finish(model, record, 'none', out, **inputs)",
        ]
    backward = draw(
        st.sampled_from(["once", "once", "once", "twice", "one by one", "first", "grad", "none"])
    )
    backward = "second" if second else backward
    lines = ["model.train()" if kind == "train" else "model.eval()", f"out = {call}"]
    if draw(st.integers(0, 5)) == 0:
        lines += [
            f"other = {call}",
            "other = other[0] if isinstance(other, tuple) else other",
            "other.sum().backward()",
        ]
    return [*lines, f"finish(model, record, {backward!r}, out, **inputs)"]

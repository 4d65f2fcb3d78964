"""Attention layers: which of them the operators serve, and that results are right."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grids import grid, named
from samples import ConvNet, distance, gradients, graph, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import softmax

import gact_graph
from gact_graph.layers.blocks import analysis, edge_work, rows
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.call import BlockedCall

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


class Other(GATConv):
    """GATConv by name, with another function of the scores."""

    def __init__(self, function: Any) -> None:
        super().__init__(32, 8, heads=3, add_self_loops=False)
        self.function = function

    def edge_update(  # type: ignore[override]
        self,
        alpha_j: Tensor,
        alpha_i: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        dim_size: int | None,
    ) -> Tensor:
        return self.function(self, alpha_j, alpha_i, index, ptr, dim_size)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor) -> Tensor:
        return score.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def _last(score: Tensor, index: Tensor, ptr: Tensor | None, size: int | None) -> Tensor:
    return F.dropout(softmax(F.leaky_relu(score, 0.2), index, ptr, size), p=0.0, training=True)


def _no_grad(conv: Other, j: Tensor, i: Tensor, *where: Any) -> Tensor:
    with torch.no_grad():
        score = j + i
    return _last(score, *where) + 0 * _last(j + i, *where)


class OtherRows(GATv2Conv):
    """GATv2Conv by name, with another function of the rows."""

    def __init__(self, function: Any) -> None:
        super().__init__(32, 8, heads=3, add_self_loops=False)
        self.other = nn.Parameter(torch.randn(1, 3, 8))
        self.function = function

    def edge_update(  # type: ignore[override]
        self,
        x_j: Tensor,
        x_i: Tensor,
        edge_attr: Tensor | None,
        index: Tensor,
        ptr: Tensor | None,
        dim_size: int | None,
    ) -> Tensor:
        return self.function(self, x_j, x_i, index, ptr, dim_size)


def _weigh(rows: Tensor, att: Tensor, *where: Any) -> Tensor:
    score = (F.leaky_relu(rows, 0.2) * att).sum(dim=-1)
    return F.dropout(softmax(score, *where), p=0.0, training=True)


class OtherProducts(TransformerConv):
    """TransformerConv by name, with another function of the rows."""

    def __init__(self, function: Any) -> None:
        super().__init__(32, 8, heads=3)
        self.function = function

    def message(  # type: ignore[override]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        return self.function(self, query_i, key_j, value_j, index, ptr, size_i)


class OtherEdgeRows(TransformerConv):
    """TransformerConv by name, with another function of the features of edges."""

    def __init__(self, function: Any) -> None:
        super().__init__(32, 8, heads=3, edge_dim=4)
        self.function = function

    def message(  # type: ignore[override]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        rows = self.lin_edge(edge_attr).view(-1, 3, 8)
        return self.function(self, query_i, key_j, value_j, rows, index, ptr, size_i)


class OtherTerms(GATConv):
    """GATConv by name, with another function of the features of edges."""

    def __init__(self, function: Any, edge_dim: int = 4) -> None:
        super().__init__(32, 8, heads=3, edge_dim=edge_dim, add_self_loops=False)
        self.function = function

    def edge_update(  # type: ignore[override]
        self,
        alpha_j: Tensor,
        alpha_i: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        dim_size: int | None,
    ) -> Tensor:
        return self.function(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size)


def _term(m: Any, features: Tensor, matrix: Tensor | None = None) -> Tensor:
    rows = F.linear(features, m.lin_edge.weight if matrix is None else matrix).view(-1, 3, 8)
    return (rows * m.att_edge).sum(dim=-1)


def _score(query: Tensor, key: Tensor) -> Tensor:
    return (query * key).sum(dim=-1) / 8**0.5


def _add(
    m: Any, score: Tensor, value: Tensor, *where: Any, keep: Any = None, rows: Tensor | None = None
) -> Tensor:
    weight = softmax(score, *where)
    m._alpha = weight if keep is None else keep(weight)
    weight = F.dropout(weight, p=0.0, training=True)
    value = value if rows is None else value + rows
    return value * weight.view(-1, 3, 1)


def _keep_dropped(m: Any, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
    m._alpha = F.dropout(softmax(_score(q, k), *where), p=0.3, training=True)
    return v * m._alpha.view(-1, 3, 1)


OTHERS = {
    "relu": lambda m, j, i, *w: F.dropout(softmax(F.relu(j + i), *w), p=0.0),
    "another order": lambda m, j, i, *w: F.dropout(F.leaky_relu(softmax(j + i, *w), 0.2), p=0.0),
    "twice": lambda m, j, i, *w: _last(i + i + j - j, *w),
    "destination alone": lambda m, j, i, *w: _last(i + i, *w),
    "squared": lambda m, j, i, *w: _last(j * j + i, *w),
    "reversed": lambda m, j, i, *w: _last(_Reversed.apply(j) + i, *w),
    "detached": lambda m, j, i, *w: _last(j.detach() + i, *w),
    "partly without gradient": _no_grad,
    "over all nodes": lambda m, j, i, index, *w: _last(j + i, index % 2, *w),
    "temperature": lambda m, j, i, *w: _last((j + i) * 2, *w),
}

OTHER_TERMS = {
    "subtracted": lambda m, j, i, e, *w: _last(j + i - _term(m, e), *w),
    "features reversed": lambda m, j, i, e, *w: _last(j + i + _term(m, e.flip(1)), *w),
    "features detached": lambda m, j, i, e, *w: _last(j + i + _term(m, e.detach()), *w),
    "matrix detached": lambda m, j, i, e, *w: _last(
        j + i + _term(m, e, m.lin_edge.weight.detach()), *w
    ),
    "squared": lambda m, j, i, e, *w: _last(j + i + _term(m, e) * _term(m, e), *w),
    "after LeakyReLU": lambda m, j, i, e, *w: F.dropout(
        softmax(F.leaky_relu(j + i, 0.2) + _term(m, e), *w), p=0.0, training=True
    ),
    "scaled": lambda m, j, i, e, *w: _last(j + i + _term(m, e * 2), *w),
    "destination alone": lambda m, j, i, e, *w: _last(i + i + _term(m, e), *w),
    "a bias": lambda m, j, i, e, *w: _last(j + i + _term(m, e) + m.bias[:3], *w),
    "left out": lambda m, j, i, e, *w: _last(j + i, *w),
}

OTHER_ROWS = {
    "product": lambda m, j, i, *w: _weigh(i * j, m.att, *w),
    "difference": lambda m, j, i, *w: _weigh(i - j, m.att, *w),
    "destination alone": lambda m, j, i, *w: _weigh(i + i, m.att, *w),
    "two vectors": lambda m, j, i, *w: _weigh(i + j, m.att * m.other, *w),
    "vector detached": lambda m, j, i, *w: _weigh(i + j, m.att.detach(), *w),
    "rows detached": lambda m, j, i, *w: _weigh(i + j.detach(), m.att, *w),
    "before LeakyReLU": lambda m, j, i, *w: F.dropout(
        softmax(F.leaky_relu(((i + j) * m.att).sum(dim=-1), 0.2), *w), p=0.0, training=True
    ),
}

OTHER_EDGE_ROWS = {
    "subtracted": lambda m, q, k, v, e, *w: _add(m, _score(q, k - e), v, *w, rows=e),
    "minus": lambda m, q, k, v, e, *w: _add(m, _score(q, k + e), v, *w, rows=-e),
    "key alone": lambda m, q, k, v, e, *w: _add(m, _score(q, k + e), v, *w),
    "value alone": lambda m, q, k, v, e, *w: _add(m, _score(q, k), v, *w, rows=e),
    "query": lambda m, q, k, v, e, *w: _add(m, _score(q + e, k), v, *w, rows=e),
    "key detached": lambda m, q, k, v, e, *w: _add(m, _score(q, k + e.detach()), v, *w, rows=e),
    "value detached": lambda m, q, k, v, e, *w: _add(m, _score(q, k + e), v, *w, rows=e.detach()),
    "key for rows": lambda m, q, k, v, e, *w: _add(m, _score(q, k + e), v, *w, rows=k),
}

OTHER_PRODUCTS = {
    "sum": lambda m, q, k, v, *w: _add(m, _score(q + k, k), v, *w),
    "destination alone": lambda m, q, k, v, *w: _add(m, _score(q, q), v, *w),
    "value for key": lambda m, q, k, v, *w: _add(m, _score(q, v), v, *w),
    "another factor": lambda m, q, k, v, *w: _add(m, _score(q, k) * 2, v, *w),
    "key detached": lambda m, q, k, v, *w: _add(m, _score(q, k.detach()), v, *w),
    "value detached": lambda m, q, k, v, *w: _add(m, _score(q, k), v.detach(), *w),
    "weights squared": lambda m, q, k, v, *w: _add(m, _score(q, k), v, *w) * m._alpha[..., None],
    "destination's value": lambda m, q, k, v, *w: _add(m, _score(q, k), q, *w),
    "keeps it detached": lambda m, q, k, v, *w: _add(m, _score(q, k), v, *w, keep=Tensor.detach),
    "keeps the square": lambda m, q, k, v, *w: _add(m, _score(q, k), v, *w, keep=torch.square),
}


def _step(model: nn.Module, seed: int = 0, **options: Any) -> list[Tensor]:
    if options:
        gact_graph.wrap(model, **{"min_bytes": 0} | options)
    torch.manual_seed(seed)
    out = model(X)
    model.zero_grad()
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), *gradients(model)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Attention]:
    """Grows with each call that takes an operator."""
    found: list[Attention] = []
    forward = BlockedCall.forward

    def watched(self: BlockedCall, *args: Any) -> list[Tensor]:
        attention = self.analysis.attention
        found.extend([] if attention is None else [attention])
        return forward(self, *args)

    monkeypatch.setattr(BlockedCall, "forward", watched)
    return found


class Renamed(GATConv):
    """As GATConv but for its name."""


TAKEN = {
    "GAT": lambda: GATConv(32, 8, heads=3),
    "one head": lambda: GATConv(32, 8),
    "mean": lambda: GATConv(32, 8, heads=5, concat=False, negative_slope=0.05),
    "no self-loops": lambda: GATConv(32, 8, heads=2, add_self_loops=False),
    "another name": lambda: Renamed(32, 8, heads=2),
    "written anew": lambda: Other(lambda m, j, i, *w: _last(j + i, *w)),
    "GATv2": lambda: GATv2Conv(32, 8, heads=3),
    "GATv2, one head": lambda: GATv2Conv(32, 8),
    "GATv2, mean": lambda: GATv2Conv(32, 8, heads=5, concat=False, negative_slope=0.05),
    "GATv2, shared": lambda: GATv2Conv(32, 8, heads=2, share_weights=True),
    "GATv2, no self-loops": lambda: GATv2Conv(32, 8, heads=2, add_self_loops=False),
    "GATv2, written anew": lambda: OtherRows(lambda m, j, i, *w: _weigh(i + j, m.att, *w)),
    "GATv2, another vector": lambda: OtherRows(lambda m, j, i, *w: _weigh(i + j, m.other, *w)),
    "Transformer": lambda: TransformerConv(32, 8, heads=3),
    "Transformer, one head": lambda: TransformerConv(32, 8),
    "Transformer, mean": lambda: TransformerConv(32, 8, heads=5, concat=False, bias=False),
    "Transformer, a gate": lambda: TransformerConv(32, 8, heads=2, beta=True),
    "Transformer, written anew": lambda: OtherProducts(
        lambda m, q, k, v, *w: _add(m, _score(q, k), v, *w)
    ),
    "Transformer, value first": lambda: OtherProducts(
        lambda m, q, k, v, *w: _add(m, _score(q, v), k, *w)
    ),
    "Transformer, keeps nothing": lambda: OtherProducts(
        lambda m, q, k, v, *w: (
            v * F.dropout(softmax(_score(q, k), *w), p=0.0, training=True).view(-1, 3, 1)
        )
    ),
}


@pytest.mark.parametrize(
    "conv",
    named(
        TAKEN,
        long=[
            "one head",
            "mean",
            "another name",
            "GATv2, one head",
            "GATv2, mean",
            "GATv2, no self-loops",
            "Transformer, one head",
            "Transformer, mean",
        ],
    ),
)
def test_attention_is_recognized_and_right(conv: Any, taken: list[Attention]) -> None:
    expected = _step(make(lambda: ConvNet(conv())))
    got = _step(make(lambda: ConvNet(conv())), blocks=256, **EXACT)
    assert distance(got, expected) < 1e-5
    assert len(taken) == 1


FEATURES = torch.randn(EDGES.size(1), 4, generator=torch.Generator().manual_seed(5))

WITH_TERMS = {
    "mean of features in self-loops": lambda: ConvNet(
        GATConv(32, 8, heads=3, edge_dim=4), FEATURES
    ),
    "no self-loops": lambda: ConvNet(
        GATConv(32, 8, heads=2, edge_dim=4, add_self_loops=False), FEATURES
    ),
    "one head, filled": lambda: ConvNet(GATConv(32, 8, edge_dim=4, fill_value=0.5), FEATURES),
    "a number an edge": lambda: ConvNet(GATConv(32, 8, heads=3, edge_dim=1), FEATURES[:, 0]),
    "as wide as nodes": lambda: ConvNet(
        GATConv(32, 8, heads=2, edge_dim=32, concat=False), FEATURES.repeat(1, 8)
    ),
    "written anew": lambda: ConvNet(
        OtherTerms(lambda m, j, i, e, *w: _last(j + i + _term(m, e), *w)), FEATURES
    ),
    "another matrix": lambda: ConvNet(
        OtherTerms(lambda m, j, i, e, *w: _last(j + i + _term(m, e, m.lin.weight), *w), 32),
        FEATURES.repeat(1, 8),
    ),
    "no features": lambda: ConvNet(GATConv(32, 8, heads=2, edge_dim=4)),
    "Transformer": lambda: ConvNet(TransformerConv(32, 8, heads=3, edge_dim=4), FEATURES),
    "Transformer, one head": lambda: ConvNet(TransformerConv(32, 8, edge_dim=4), FEATURES),
    "Transformer, a number an edge": lambda: ConvNet(
        TransformerConv(32, 8, heads=5, concat=False, edge_dim=1), FEATURES[:, :1].clone()
    ),
    "Transformer, as wide as nodes": lambda: ConvNet(
        TransformerConv(32, 8, heads=2, beta=True, edge_dim=32), FEATURES.repeat(1, 8)
    ),
    "Transformer, written anew": lambda: ConvNet(
        OtherEdgeRows(lambda m, q, k, v, e, *w: _add(m, _score(q, k + e), v, *w, rows=e)), FEATURES
    ),
    "Transformer, value first": lambda: ConvNet(
        OtherEdgeRows(lambda m, q, k, v, e, *w: _add(m, _score(q, v + e), k, *w, rows=e)), FEATURES
    ),
}


def _others(
    kind: Any, functions: dict[str, Any], features: Tensor | None = None, long: str = ""
) -> list[Any]:
    """Nets of a kind of layer with other functions; some in the long suite."""
    extra = () if features is None else (features,)
    nets = {name: lambda f=f: ConvNet(kind(f), *extra) for name, f in functions.items()}
    return named(nets, long=[*filter(None, long.split(", "))])


@pytest.mark.parametrize(
    "net",
    [
        *_others(Other, OTHERS),
        *_others(
            OtherTerms,
            OTHER_TERMS,
            FEATURES.clone().requires_grad_(),
            long="squared, destination alone",
        ),
        *_others(OtherRows, OTHER_ROWS, long="product, difference"),
        *_others(OtherEdgeRows, OTHER_EDGE_ROWS, FEATURES, long="key detached, key for rows"),
        *_others(OtherProducts, OTHER_PRODUCTS, long="sum, destination alone"),
    ],
)
def test_others_are_left_as_they_are(net: Any, taken: list[Attention]) -> None:
    expected = _step(make(net))
    got = _step(make(net), blocks=256, **EXACT)
    assert distance(got, expected) < 1e-5
    assert not taken


@pytest.mark.parametrize(
    "net",
    named(
        WITH_TERMS,
        long=[
            "no self-loops",
            "one head, filled",
            "Transformer, one head",
            "Transformer, as wide as nodes",
        ],
    ),
)
def test_features_of_edges_are_recognized_and_right(net: Any, taken: list[Attention]) -> None:
    expected = _step(make(net))
    got = _step(make(net), blocks=256, **EXACT)
    assert distance(got, expected) < 1e-5
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("kind", "heads", "learns"), grid([GATConv, TransformerConv], [1, 3], [False, True])
)
def test_features_of_edges_have_a_gradient(
    kind: Any, heads: int, learns: bool, taken: list[Attention]
) -> None:
    """And everything else has its own, in float64."""

    def found(**options: Any) -> list[Tensor]:
        conv = make(lambda: kind(32, 8, heads=heads, edge_dim=4)).double()
        features, x = FEATURES.double().requires_grad_(learns), X.double().requires_grad_()
        if options:
            gact_graph.wrap(conv, **{"min_bytes": 0} | options)
        out = conv(x, EDGES, features)
        leaves = [x, *conv.parameters(), *([features] if learns else [])]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    for got, expected in zip(found(blocks=256, **EXACT), found(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    assert len(taken) == 1


def test_sorted_edges_have_no_places(taken: list[Attention]) -> None:
    """Their features lie in the order of destinations already."""
    edges = EDGES[:, EDGES[1].argsort(stable=True)]

    def found(**options: Any) -> list[Tensor]:
        conv = make(lambda: TransformerConv(32, 8, heads=2, edge_dim=4)).double()
        features, x = FEATURES.double().requires_grad_(), X.double().requires_grad_()
        if options:
            gact_graph.wrap(conv, **{"min_bytes": 0} | options)
        out, (_, weight) = conv(x, edges, features, return_attention_weights=True)
        loss = out.square().sum() + weight.square().sum()
        return [out.detach(), *torch.autograd.grad(loss, [x, features, *conv.parameters()])]

    for got, expected in zip(found(blocks=256, **EXACT), found(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [(GATConv, "lin_edge.weight"), (GATConv, "att_edge"), (TransformerConv, "lin_edge.weight")],
)
def test_parameters_may_be_frozen(kind: Any, frozen: str, taken: list[Attention]) -> None:
    def net() -> nn.Module:
        conv = kind(32, 8, heads=2, edge_dim=4)
        conv.get_parameter(frozen).requires_grad_(False)
        return ConvNet(conv, FEATURES)

    assert distance(_step(make(net), blocks=256, **EXACT), _step(make(net))) < 1e-5
    assert taken


@pytest.mark.parametrize("kind", [GATConv, TransformerConv])
def test_features_are_left_to_autocast(kind: Any, taken: list[Attention]) -> None:
    """Which rounds the rows of edges."""
    net = lambda: ConvNet(kind(32, 8, heads=2, edge_dim=4), FEATURES)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = _step(make(net)), _step(make(net), blocks=256, **EXACT)
    assert distance(got, expected) < 1e-2
    assert not taken


def test_what_is_kept_must_be_before_dropout(taken: list[Attention]) -> None:
    _step(make(lambda: ConvNet(OtherProducts(_keep_dropped))), blocks=256, **EXACT)
    assert not taken


def test_parameters_may_be_frozen_later(taken: list[Attention]) -> None:
    layer = lambda: ConvNet(OtherRows(lambda m, j, i, *w: _weigh(i + j, m.att, *w)))  # noqa: E731
    net, stock = make(layer), make(layer)
    gact_graph.wrap(net, blocks=256, **EXACT)
    for frozen in ((), ("lin_l",), ("att",), ("other", "bias")):
        for model in (net, stock):
            for name, parameter in model.conv.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
        taken.clear()
        got, expected = _step(net), _step(stock)
        assert distance(got, expected) < 1e-5
        assert len(taken) == 1


@pytest.mark.parametrize(
    ("kind", "features"),
    [(GATv2Conv, []), (TransformerConv, []), (partial(TransformerConv, edge_dim=4), [FEATURES])],
)
def test_rows_may_stay_coded(
    kind: Any, features: list[Tensor], monkeypatch: pytest.MonkeyPatch, taken: list[Attention]
) -> None:
    """The operator reads the values that blocks read, decoded by parts."""

    def found() -> list[Tensor]:
        net = make(lambda: ConvNet(kind(32, 64, heads=2), *features))
        return _step(net, level="L1", bits=4, adaptive=False, blocks=256, min_bytes=0)

    monkeypatch.setattr(rows, "_DECODED_BYTES", 20_000)
    got = found()
    assert taken
    monkeypatch.setattr(analysis, "match_attention", lambda *_: None)
    monkeypatch.setattr(edge_work, "_known", OrderedDict())
    assert distance(got, found()) < 1e-5
    assert len(taken) == 1


def test_features_within_leaky_relu_are_left(taken: list[Attention]) -> None:
    for conv in (lambda: ConvNet(GATv2Conv(32, 8, heads=2, edge_dim=4), FEATURES),):
        assert distance(_step(make(conv), blocks=256, **EXACT), _step(make(conv))) < 1e-5
    assert not taken


def test_what_turns_into_another_is_noticed(taken: list[Attention]) -> None:
    turned: list[bool] = []
    net = make(
        lambda: ConvNet(
            Other(lambda m, j, i, *w: _last(j + i, *w).square() if turned else _last(j + i, *w))
        )
    )
    gact_graph.wrap(net, blocks=256, **EXACT)
    net(X)
    assert len(taken) == 1
    turned.append(True)
    got = _step(net)
    assert len(taken) == 1
    gact_graph.unwrap(net)
    assert distance(got, _step(net)) < 1e-5


@pytest.mark.parametrize("level", ["lossless", "CB2"])
def test_dropout_of_rows_is_the_same_in_backward(level: str, taken: list[Attention]) -> None:
    """As below; the weights are alike without att, whatever the rows are."""
    conv = make(lambda: GATv2Conv(32, 8, heads=3, dropout=0.5, bias=False))
    torch.nn.init.zeros_(conv.att)
    model = gact_graph.wrap(ConvNet(conv), blocks=256, **EXACT | {"level": level})
    torch.manual_seed(1)
    out = model(X)
    out.backward(gradient := torch.randn_like(out))
    assert taken
    assert conv.att.grad is not None and conv.att.grad.abs().max() > 0
    of_values = (conv.lin_l.weight.grad * conv.lin_l.weight).sum().item()
    assert of_values == pytest.approx((out * gradient).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    "options", [EXACT, {"level": "L1", "bits": 2}, {"level": "CB2", "adaptive": False}], ids=str
)
def test_dropout_of_products_is_the_same_in_backward(
    options: dict[str, Any], taken: list[Attention]
) -> None:
    """As below; without queries the weights are alike, whatever the keys are."""
    conv = make(lambda: TransformerConv(32, 8, heads=3, dropout=0.5, bias=False, root_weight=False))
    torch.nn.init.zeros_(conv.lin_query.weight)
    for linear in (conv.lin_query, conv.lin_key, conv.lin_value):
        linear.register_parameter("bias", None)  # PyG 2.6 has them in any case
    model = gact_graph.wrap(ConvNet(conv), blocks=256, **{"min_bytes": 0} | options)
    torch.manual_seed(1)
    out = model(X)
    out.backward(out.detach())
    assert taken
    of_values = (conv.lin_value.weight.grad * conv.lin_value.weight).sum().item()
    tolerance = 1e-4 if options is EXACT else 0.05
    assert of_values == pytest.approx(out.square().sum().item(), rel=tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("only", [False, True])
def test_returned_weights_have_a_gradient(
    only: bool, dropout: float, taken: list[Attention]
) -> None:
    """They are what they are before dropout; with dropout the sum counts for nothing here."""

    def found(**options: Any) -> list[Tensor]:
        conv = make(lambda: TransformerConv(32, 8, heads=2, dropout=dropout))
        if options:
            gact_graph.wrap(conv, **{"min_bytes": 0} | options)
        out, (_, weight) = conv(X, EDGES, return_attention_weights=True)
        of_weight = torch.linspace(-1, 2, weight.numel()).view(weight.shape)
        loss = (weight * of_weight).sum()
        (
            loss if only else loss + 0 * out.sum() if dropout else loss + out.square().sum()
        ).backward()
        return [weight.detach(), *gradients(conv)]

    assert distance(found(blocks=256, **EXACT), found()) < 1e-5
    assert taken


@pytest.mark.parametrize("options", [EXACT, {"level": "CB2", "adaptive": False}], ids=str)
def test_dropout_of_backward_is_that_of_forward(
    options: dict[str, Any], taken: list[Attention]
) -> None:
    """The output is linear in the rows that are added up: by Euler, <out, g> = <x, dx>.

    With g = out no terms cancel, and the noise of the codes is small beside the sum.
    """
    conv = make(lambda: GATConv(32, 8, heads=3, dropout=0.5, bias=False))
    torch.nn.init.zeros_(conv.att_src)
    torch.nn.init.zeros_(conv.att_dst)
    model = gact_graph.wrap(ConvNet(conv), blocks=256, **{"min_bytes": 0} | options)
    torch.manual_seed(1)
    out = model(X)
    out.backward(out.detach())
    assert taken
    of_values = (conv.lin.weight.grad * conv.lin.weight).sum().item()
    tolerance = 1e-4 if options is EXACT else 0.05
    assert of_values == pytest.approx(out.square().sum().item(), rel=tolerance)


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_dropout_follows_the_global_seed(kind: Any, taken: list[Attention]) -> None:
    conv = lambda: ConvNet(kind(32, 8, heads=3, dropout=0.5))  # noqa: E731
    model = gact_graph.wrap(make(conv), blocks=256, **EXACT)
    first, again, other = _step(model, 3), _step(model, 3), _step(model, 4)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    torch.manual_seed(3)
    one, two = model(X), model(X)
    assert not torch.equal(one, two)
    model.eval()
    assert torch.equal(model(X), model(X))


@pytest.mark.parametrize(
    ("kind", "edge_dim"),
    [
        (GATConv, 4),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (GATConv, None),
                (GATv2Conv, None),
                (TransformerConv, None),
                (TransformerConv, 4),
            )
        ),
    ],
)
def test_dropout_gives_the_right_gradient_on_average(kind: Any, edge_dim: int | None) -> None:
    """Against the mean of stock PyG: over 300 seeds both are within their noise of each other."""
    features = [] if edge_dim is None else [FEATURES]
    conv = lambda: ConvNet(kind(32, 8, heads=2, dropout=0.3, edge_dim=edge_dim), *features)  # noqa: E731

    def found(**options: Any) -> tuple[Tensor, Tensor]:
        model = make(conv)
        if options:
            gact_graph.wrap(model, **{"min_bytes": 0} | options)
        steps = [_step(model, seed) for seed in range(300)]
        of_att = torch.stack([torch.cat([t.flatten() for t in step]) for step in steps])
        return of_att.mean(0), of_att.var(0) / len(steps)

    mean, var = found(blocks=256, **EXACT)
    expected, other = found()
    z = (mean - expected) / (var + other).sqrt().clamp_min(1e-7)
    assert z.square().mean() < 1.5


# test_double_backward.py has layers without dropout.
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.5])
@pytest.mark.parametrize(
    "kind",
    [
        *(GATConv, partial(GATConv, edge_dim=3), GATv2Conv),
        *(partial(GATv2Conv, share_weights=True), TransformerConv),
        partial(TransformerConv, edge_dim=3),
    ],
)
def test_second_derivatives_have_the_mask_of_forward(kind, dropout, taken):
    torch.manual_seed(0)
    conv = kind(6, 4, heads=2, dropout=dropout).double()
    gact_graph.wrap(conv, bits=32, level="lossless", blocks=64, min_bytes=0)
    x = torch.randn(50, 6, dtype=torch.float64)
    edges = torch.randint(50, (2, 300))
    has_terms = getattr(conv, "edge_dim", None) is not None
    features = [torch.randn(300, 3, dtype=torch.float64)] if has_terms else []
    direction = torch.randn_like(x)

    def gradient(at, create_graph=False):
        torch.manual_seed(1)
        at = at.clone().requires_grad_()
        loss = conv(at, edges, *features).tanh().sum()
        return at, torch.autograd.grad(loss, at, create_graph=create_graph)[0]

    at, first = gradient(x, create_graph=True)
    assert taken
    (found,) = torch.autograd.grad((first * direction).sum(), at)
    step = 1e-6 * direction
    expected = (gradient(x + step)[1] - gradient(x - step)[1]) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("terms", [False, True])
def test_second_derivatives_reach_what_learns(terms):
    """That of a gradient by att, and the gradient of a gradient's att; and of features."""
    torch.manual_seed(0)
    conv = (GATConv(6, 4, heads=2, edge_dim=3) if terms else GATv2Conv(6, 4, heads=2)).double()
    x, edges = torch.randn(50, 6, dtype=torch.float64), torch.randint(50, (2, 300))
    features = torch.randn(300, 3, dtype=torch.float64, requires_grad=True)
    own = [features, conv.att_edge, conv.lin_edge.weight] if terms else [conv.att]

    def found():
        at = x.clone().requires_grad_()
        torch.manual_seed(1)
        loss = conv(at, edges, *([features] if terms else [])).tanh().sum()
        first = torch.autograd.grad(loss, [at, *own], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [at, *own])

    expected = found()
    gact_graph.wrap(conv, bits=32, level="lossless", blocks=64, min_bytes=0)
    for one, other in zip(found(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)

"""A codec of the user's: registered, trained with, seen in the report, and removed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from samples import GraphNet, Mlp, distance, equal, graph, make, one_thread, train_step  # noqa: F401

import gact_graph
from gact_graph import codecs
from gact_graph.codecs import Codec, Drop, Encoded, Mask, Quantize, Values

X, EDGES = graph()


def example() -> str:
    """The code in the documentation of ``register``."""
    text = inspect.getdoc(codecs.register)
    assert text is not None
    return text.partition("```python\n")[2].partition("```")[0]


@pytest.fixture(autouse=True)
def _only_while_a_test_runs() -> Iterator[None]:
    before = codecs.registered()
    yield
    for codec in codecs.registered():
        if codec not in before:
            codecs.unregister(codec)
    assert codecs.registered() == before


class Halves(Encoded):
    """float32 as two tensors of 16 bits: nothing is lost, and nothing is saved."""

    codec = "halves"

    def __init__(self, x: torch.Tensor) -> None:
        self.halves = x.view(torch.int16).clone()

    @property
    def nbytes(self) -> int:
        return self.halves.nbytes

    def decode(self) -> torch.Tensor:
        return self.halves.view(torch.float32)


class ToHalves(Codec):
    lossless = True

    def encode(self, request: codecs.Request) -> Halves | None:
        return Halves(request.tensor) if request.tensor.dtype == torch.float32 else None


class Bfloat16(Encoded):
    codec = "bfloat16"

    def __init__(self, x: torch.Tensor) -> None:
        self.short = x.bfloat16()

    @property
    def nbytes(self) -> int:
        return self.short.nbytes

    def decode(self) -> torch.Tensor:
        return self.short.float()


class ToBfloat16(Codec):
    def encode(self, request: codecs.Request) -> Bfloat16 | None:
        takes = request.tensor.dtype == torch.float32 and isinstance(request.reads, Values)
        return Bfloat16(request.tensor) if takes else None


def names(model: torch.nn.Module) -> set[str]:
    return {row.codec for row in gact_graph.report(model).contexts}


@pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
def test_the_documented_example_trains_and_shows_in_the_report(kind):
    exec(example(), {"__name__": "example"})
    codec = next(c for c in codecs.registered() if type(c).__name__ == "ToBfloat16")
    model, stock = (
        gact_graph.wrap(make(lambda: GraphNet(kind)), min_bytes=0),
        make(lambda: GraphNet(kind)),
    )
    actual = train_step(model, X, EDGES)
    assert 0 < distance(actual, train_step(stock, X, EDGES)) < 0.02
    assert "bfloat16" in names(model) and "quantize" not in names(model)
    assert "bfloat16" in str(gact_graph.report(model))
    rows = [row for row in gact_graph.report(model).contexts if row.codec == "bfloat16"]
    assert all(row.stored_bytes == 2 * row.numel for row in rows)

    codecs.unregister(codec)
    train_step(model, X, EDGES)
    assert "bfloat16" not in names(model) and "quantize" in names(model)


def test_by_default_it_comes_after_lossless_codecs():
    codecs.register(ToBfloat16())
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), blocks=False, min_bytes=0)
    train_step(model, X, EDGES)
    # Gathered messages, masks and indices keep the forms that cost nothing.
    assert names(model) >= {"bfloat16", "gather", "mask", "index"}


def test_it_can_be_asked_before_any_other():
    codecs.register(ToBfloat16(), before=Drop)
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), blocks=False, min_bytes=0)
    train_step(model, X, EDGES)
    assert "gather" not in names(model)
    slots = {row.slot: row.codec for row in gact_graph.report(model).contexts}
    assert slots["dropout.other"] == "bfloat16"  # noise, too, which is otherwise drawn as bits


def test_the_last_one_registered_in_a_place_is_asked_right_before_it():
    first, second = ToBfloat16(), ToHalves()
    codecs.register(first, before=Quantize)
    codecs.register(second, before=Quantize)
    assert [type(c) for c in codecs.registered()][-3:] == [ToBfloat16, ToHalves, Quantize]
    codecs.register(ToHalves(), before=ToBfloat16)
    assert [type(c) for c in codecs.registered()][-4:] == [ToHalves, ToBfloat16, ToHalves, Quantize]


@pytest.mark.parametrize(("codec", "asked"), [(ToHalves(), True), (ToBfloat16(), False)])
def test_the_level_lossless_asks_only_lossless_codecs(codec, asked):
    codecs.register(codec)
    model = gact_graph.wrap(make(lambda: GraphNet("gcn")), level="lossless", min_bytes=0)
    actual = train_step(model, X, EDGES)
    assert equal(actual, train_step(make(lambda: GraphNet("gcn")), X, EDGES))
    assert ("halves" in names(model)) is asked


def test_l0_asks_none():
    codecs.register(ToHalves(), before=Drop)
    model = gact_graph.wrap(make(Mlp), level="L0", min_bytes=0)
    train_step(model, X)
    assert names(model) == {"keep"}


def test_contexts_decode_after_their_codec_was_removed():
    codec = ToHalves()
    codecs.register(codec)
    model = gact_graph.wrap(make(Mlp), level="lossless", min_bytes=0)
    out = model(X)
    assert "halves" in names(model)
    codecs.unregister(codec)
    out.sum().backward()
    stock = make(Mlp)
    stock(X).sum().backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in stock.parameters()])


def test_a_built_in_codec_can_be_replaced():
    [mask] = [codec for codec in codecs.registered() if isinstance(codec, Mask)]
    codecs.unregister(mask)
    try:
        model = gact_graph.wrap(make(lambda: GraphNet("gcn")), level="lossless", min_bytes=0)
        train_step(model, X, EDGES)
        assert "mask" not in names(model)
    finally:
        codecs.register(mask, before=codecs.Index)


class TestErrors:
    def test_no_codec(self):
        with pytest.raises(TypeError, match=r"gact_graph.codecs.Codec \(got ToHalves\)"):
            codecs.register(ToHalves)
        with pytest.raises(TypeError, match=r"\(got int\); write register\(MyCodec\(\)\)"):
            codecs.register(3)

    def test_twice(self):
        codec = ToHalves()
        codecs.register(codec)
        with pytest.raises(ValueError, match="got this ToHalves again"):
            codecs.register(codec)

    def test_before_a_codec_that_does_not_exist(self):
        with pytest.raises(ValueError, match=r"one of Drop, Rebuild, .* \(got .*ToHalves"):
            codecs.register(ToBfloat16(), before=ToHalves)

    def test_removing_a_codec_that_does_not_exist(self):
        with pytest.raises(ValueError, match="Expected a registered codec"):
            codecs.unregister(ToHalves())

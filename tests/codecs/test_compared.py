"""A context in two widths."""

from __future__ import annotations

import dataclasses
import functools
import weakref

import pytest
import torch
from torch import Tensor

from gact_graph.codecs import Context, Encoded, Request, Saved, encode
from gact_graph.codecs.compared import MeasuredWidths, in_two_widths
from gact_graph.codecs.keep import Kept
from gact_graph.codecs.reads import VALUES

SLOT = "lin/linear.input"


def keep_nothing(*tensors: Tensor) -> Saved:
    raise AssertionError("Expected no reference to another tensor")


def encoded(request: Request) -> Encoded:
    return encode(request, False, True)


def make(x: Tensor, bits: int) -> tuple[Context, MeasuredWidths, Encoded]:
    """A context of both widths, the switch between them, and the tensor's form in training."""

    keep = functools.partial(keep_nothing, x)  # holds the tensor, as a session's does
    request = Request(x, SLOT, "linear", VALUES, None, keep, bits, 256, 7)
    narrow = encoded(request)
    widths = MeasuredWidths()
    context = in_two_widths(request, narrow, encoded, widths)
    assert context is not None
    return context, widths, narrow


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_narrow_width_is_off_by_its_own_noise(bits: int) -> None:
    x = torch.randn(1 << 16)
    context, widths, trained = make(x, bits)
    fine = context.encoded.decode()
    widths.narrow = SLOT
    error = context.encoded.decode() - fine
    expected = (trained.decode() - x).square().mean()
    assert error.square().mean() == pytest.approx(float(expected), rel=0.1)
    # Unbiased, and drawn anew: with the noise of the fine width it would go the same way.
    noise = float(error.square().mean().sqrt())
    assert abs(float(error.mean())) < 4 * noise / 256
    assert abs(float(torch.corrcoef(torch.stack([error, fine - x]))[0, 1])) < 0.03
    assert torch.equal(context.encoded.decode() - fine, error)
    assert widths.slots == {SLOT: bits}


def test_one_slot_is_narrow() -> None:
    context, widths, trained = make(torch.randn(4096), 4)
    assert context.encoded.bits == 6
    widths.narrow = SLOT
    widths.read.clear()
    assert context.encoded.bits == trained.bits == 4
    assert widths.read == {SLOT}
    widths.narrow = "another"
    assert context.encoded.bits == 6


def test_it_holds_the_fine_width_alone() -> None:
    x = torch.randn(1 << 16)
    context, widths, trained = make(x, 4)
    assert context.form.nbytes == trained.nbytes and context.form.bits == 4
    assert context.encoded.nbytes == pytest.approx(trained.nbytes * 6 / 4, rel=0.05)
    reference = weakref.ref(x)
    del x
    assert reference() is None
    widths.narrow = SLOT
    assert context.encoded.nbytes == trained.nbytes


def test_tensors_that_the_model_holds_have_one_width() -> None:
    x = torch.randn(4096)
    context, widths, _ = make(x, 4)
    context.encoded = Kept(x, "why")
    widths.narrow = SLOT
    assert torch.equal(context.encoded.decode(), x)


def encode_nothing(request: Request) -> Encoded:
    raise AssertionError("Expected no other width")


def test_exact_and_wide_forms_have_one_width() -> None:
    x = torch.randn(4096)

    request = Request(x, SLOT, "linear", VALUES, None, keep_nothing, 32, 256, 7)
    wide = dataclasses.replace(request, bits=16)
    for one in (request, wide):
        assert in_two_widths(one, encoded(one), encode_nothing, MeasuredWidths()) is None


def test_a_codec_with_one_width_has_no_other() -> None:
    request = Request(torch.randn(4096), SLOT, "linear", VALUES, None, keep_nothing, 4, 256, 7)
    narrow, widths = encoded(request), MeasuredWidths()
    assert in_two_widths(request, narrow, lambda _: narrow, widths) is None and not widths.slots

"""Noise relative to a channel, a row or the messages of a node, where backward scales by them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from samples import FEATURES, Lambda, graph, one_thread, seeded  # noqa: F401
from simulated import Simulated
from torch import Tensor, nn
from torch_geometric.nn import DiffGroupNorm, GraphNorm, InstanceNorm, PNAConv, SAGEConv
from torch_geometric.nn.aggr import StdAggregation, VarAggregation
from torch_geometric.utils import degree

import gact_graph
from gact_graph.codecs import Context, Saved, encode
from gact_graph.codecs.codec import Request
from gact_graph.codecs.offload.swap import Swap, Swapping
from gact_graph.codecs.quantize import Quantized
from gact_graph.codecs.reads import Values
from gact_graph.codecs.slices import _statistics
from gact_graph.support import current


def by_channel(x: Tensor, channels: tuple[int, int], bits: int = 4):
    channels, inner = channels
    return by_slice(x, (max(1, x.numel() // (channels * inner)), channels, inner), (0, 2), bits)


def by_slice(x: Tensor, shape: tuple[int, ...], dims: tuple[int, ...], bits: int):
    request = Request(
        tensor=x.reshape(-1),
        slot="batch_norm.input",
        operation="batch_norm",
        reads=Values(slices=(shape, dims)),
        recipe=None,
        keep=lambda source: pytest.fail("nothing was gathered"),
        bits=bits,
        group_size=256,
        seed=1,
    )
    return encode(request, lossless=True, lossy=True)


def scaled(channels: int = 64, rows: int = 500) -> Tensor:
    """[rows, channels] with deviations from 1 to 0.01, and means that are larger still."""
    deviations = torch.logspace(0, -2, channels)
    return (torch.randn(rows, channels, generator=seeded(1)) + 5) * deviations


class TestCodec:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_the_error_is_relative_to_each_channel(self, dtype):
        x = scaled().to(dtype)
        form = by_channel(x, (64, 1), bits=6)
        back = form.decode()
        assert (back.dtype, back.shape, form.bits) == (dtype, (500 * 64,), 6)
        error = (back.view(500, 64) - x).double().std(0) / x.double().std(0)
        # A step is 1/63 of about 7 deviations.
        assert error.max() < 0.08
        assert error.min() > 0.02

    @pytest.mark.parametrize("dims", [(0,), (1,)])
    def test_columns_and_rows_of_a_square_matrix(self, dims):
        x = torch.randn(96, 96, generator=seeded(1)) * 3
        x += torch.arange(96.0).view(-1, 1) if dims == (1,) else torch.arange(96.0)
        form = by_slice(x, (96, 96), dims, 8)
        for decoding in (form, form.min_variance(), form.decorrelated()):
            back = decoding.decode().view(96, 96)
            assert (back - x).abs().max() < 0.2
            torch.testing.assert_close(back.mean(dims), x.mean(dims), rtol=1e-4, atol=1e-4)

    def test_the_mean_of_a_channel_is_exact(self):
        x = scaled()
        back = by_channel(x, (64, 1), bits=2).decode().view(500, 64)
        assert ((back - x).mean(0).abs() < 1e-5 * x.std(0) + 1e-6).all()

    @pytest.mark.parametrize(
        ("shape", "dims"),
        [
            *(((600,), (0,)), ((60, 5), (0,)), ((60, 5), (1,)), ((60, 5), (0, 1))),
            *(((60, 5, 1), (0, 2)), ((60, 5, 7), (0, 2)), ((60, 5, 7), (0,)), ((60, 5, 7), (1, 2))),
            *(((20, 20, 1), (0, 1)), ((20, 20, 1), (1,))),
        ],
    )
    def test_deviations_are_those_of_any_slices(self, shape, dims):
        x = torch.randn(shape, generator=seeded(2)) * 3 + 1
        variance, mean = torch.var_mean(x.double(), dims, correction=0, keepdim=True)
        actual, deviation = _statistics(x, dims)
        assert actual.shape == deviation.shape == mean.shape
        torch.testing.assert_close(actual.double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(deviation, variance.sqrt().bfloat16())

    @pytest.mark.parametrize("scale", [1e-4, 300.0, 3000.0])
    def test_variances_that_float16_does_not_hold(self, scale):
        x = (torch.randn(100, 64, generator=seeded(1)) * scale).half()
        back = by_slice(x, (100, 64), (1,), 8).decode().view(100, 64)
        assert (back.float() - x.float()).abs().max() < 0.05 * scale

    def test_a_variance_that_float32_does_not_hold(self):
        x = torch.randn(500, 64, generator=seeded(1)) * 1e20
        for values in (x, torch.cat([x[:, :1], torch.randn(500, 63)], 1)):
            back = by_channel(values, (64, 1), bits=8).decode().view(500, 64)
            assert (back.double() - values).norm() < 0.05 * values.double().norm()

    def test_bytes(self):
        # Codes, statistics of 125 groups, a float32 and a bfloat16 a channel, and a share.
        assert by_channel(scaled(), (64, 1)).nbytes == 500 * 64 // 2 + 125 * 4 + 64 * 6 + 4

    def test_one_read_has_half_the_noise(self):
        x = scaled()
        form = by_channel(x, (64, 1))
        readings = (form, form.min_variance(), form.decorrelated())
        first, alone, second = (
            float(((form.decode().view(500, 64) - x) / x.std(0)).square().mean())
            for form in readings
        )
        # Means of 32,000 squares.
        assert second == pytest.approx(first, rel=0.1)
        assert alone == pytest.approx(first / 2, rel=0.1)

    def test_readers_of_each_tensor(self):
        """Alone in both readings; where rows of it are gathered, each reader has one of its own."""
        form = by_channel(scaled(), (64, 1))
        for leave in (lambda encoded: encoded, Swap(Swapping(Simulated(), least=0)).leave):
            saved = Saved(Context(leave(form)))
            assert torch.equal(saved.tensor(), form.min_variance().decode())
            saved.context.gathered = True
            assert torch.equal(saved.tensor(), form.decorrelated().decode())
            assert torch.equal(saved.source(), form.decode())

    def test_elements_that_lie_together(self):
        images = torch.randn(20, 8, 5, 7, generator=seeded(2)) * torch.logspace(3, 0, 8).view(
            -1, 1, 1
        )
        back = by_channel(images, (8, 35), bits=8).decode().view_as(images)
        error = (back - images).std((0, 2, 3)) / images.std((0, 2, 3))
        assert error.max() < 0.03

    def test_a_constant_channel_comes_back(self):
        x = scaled()
        x[:, 3] = 7.0
        assert torch.allclose(by_channel(x, (64, 1), bits=8).decode().view(-1, 64)[:, 3], x[:, 3])

    def test_rows_that_do_not_divide_are_quantized_flat(self):
        assert type(by_channel(torch.randn(1001), (64, 1))) is Quantized

    def test_slices_of_few_elements_are_quantized_as_they_lie(self):
        """Their statistics would take more room than their codes."""
        assert type(by_channel(torch.randn(7, 64), (64, 1))) is Quantized

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_inf_are_exact_and_alone(self, value):
        x = scaled()
        x[7, 3] = value
        form = by_channel(x, (64, 1), bits=8)
        back = form.decode().view(500, 64)
        assert torch.equal(back[7, 3], x[7, 3]) or (back[7, 3].isnan() and x[7, 3].isnan())
        assert back.isfinite().sum() == x.numel() - 1
        assert type(form) is Quantized and form.nbytes < x.nbytes / 3

    def test_may_be_moved(self):
        form = by_channel(scaled(), (64, 1))
        moved = form.moved(*(t.clone() for t in form.movable()))
        assert torch.equal(moved.decode(), form.decode()) and moved.bits == form.bits
        assert torch.equal(moved.min_variance().decode(), form.min_variance().decode())


def error_of(make, *inputs: Tensor, **options: object) -> float:
    """Of the gradient of all parameters under one draw of the noise, which must have an effect."""

    def gradient(model: nn.Module) -> Tensor:
        out = model(*inputs)
        out.backward(torch.randn(out.shape, generator=seeded(5)))
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.manual_seed(0)
    exact = gradient(make())
    torch.manual_seed(0)
    got = gradient(gact_graph.wrap(make(), adaptive=False, blocks=False, min_bytes=0, **options))
    error = float((got - exact).norm() / exact.norm())
    assert error > 0, "no tensor that matters has noise"
    return error


class TestBatchNorm:
    @pytest.mark.parametrize(("bits", "most"), [(4, 0.1), (2, 0.4)])
    def test_channels_of_different_scale(self, bits, most):
        """Relative to the largest channels, the error was 1.5 at 4 bits and 30 at 2."""

        def net() -> nn.Module:
            first = nn.Linear(FEATURES, 64)
            with torch.no_grad():
                first.weight.mul_(torch.logspace(0, -2, 64)[torch.randperm(64), None])
            # A product with an input would be computed again, exactly; its copy is not.
            norm = nn.BatchNorm1d(64)
            return nn.Sequential(first, Of(torch.clone), norm, nn.ReLU(), nn.Linear(64, 5))

        x = torch.randn(2000, FEATURES, generator=seeded(6))
        assert error_of(net, x, bits=bits) < most

    def test_other_layouts(self):
        """A tensor that is not contiguous is quantized in the order of its memory."""

        def forward(module, x):
            h = (x @ module.weight).clone().view(30, 10, 64).transpose(1, 2)
            return torch.nn.functional.batch_norm(h, None, None, training=True)

        x = torch.randn(300, FEATURES, generator=seeded(7))
        assert error_of(lambda: Lambda(forward), x, bits=8) < 0.02


class Scaled(nn.Module):
    """A module after a trainable scale, whose gradient is that of the module's input.

    The scaled input is cloned, since a product with an input would be computed again, exactly.
    """

    def __init__(self, shape: Sequence[int], module: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.module = module

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return self.module(x.mul(self.scale).clone(), *args)


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def of_scales(*shape: int, of: int) -> Tensor:
    """Normal numbers; the first ``of`` dimensions number slices with deviations of 1 to 0.01."""
    scales = torch.logspace(0, -2, torch.Size(shape[:of]).numel())
    order = torch.randperm(len(scales), generator=seeded(9))
    ones = [1] * (len(shape) - of)
    return torch.randn(shape, generator=seeded(8)) * scales[order].view(*shape[:of], *ones)


ROWS, IMAGES = (1024, 64), (16, 32, 8, 8)
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(64), of_scales(*ROWS, of=1)),
    "LayerNorm of rows with other means": (
        lambda: nn.LayerNorm(64),
        0.1 * of_scales(*ROWS, of=0) + 10 * torch.randn(1024, 1, generator=seeded(3)),
    ),
    "RMSNorm": (lambda: nn.RMSNorm(64), of_scales(*ROWS, of=1)),
    "GroupNorm": (lambda: nn.GroupNorm(32, 32), of_scales(*IMAGES, of=2)),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(32, affine=True), of_scales(*IMAGES, of=2)),
    "normalize": (
        lambda: Of(lambda x: torch.nn.functional.normalize(x, dim=-1)),
        of_scales(*ROWS, of=1),
    ),
    "quotient by norms": (
        lambda: Of(lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
        of_scales(*ROWS, of=1),
    ),
    "quotient by expanded norms": (
        lambda: Of(lambda x: x / torch.linalg.vector_norm(x, dim=-1).unsqueeze(1).expand_as(x)),
        of_scales(*ROWS, of=1),
    ),
    "quotient by repeated norms": (
        lambda: Of(lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).repeat(1, 64)),
        of_scales(*ROWS, of=1),
    ),
    "quotient by sums": (
        lambda: Of(lambda x: x / x.sum(-1, keepdim=True)),
        of_scales(*ROWS, of=1).abs(),
    ),
    "quotient of narrow rows": (
        lambda: Of(lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
        of_scales(16384, 4, of=1),
    ),
    "quotient of images": (
        lambda: Of(lambda x: x / torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)),
        of_scales(*IMAGES, of=2),
    ),
    "norms": (
        lambda: Of(lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
        of_scales(*ROWS, of=1),
    ),
    "deviation of channels": (
        lambda: Of(lambda x: x.std(0)),
        0.1 * of_scales(*ROWS, of=0) + 30 * torch.randn(64, generator=seeded(3)),
    ),
}


class TestOtherNorms:
    @pytest.mark.parametrize("name", NORMS)
    def test_slices_of_different_scale(self, name):
        """Relative to the largest slices, the errors were 0.12 (norms) to 85 (narrow rows)."""
        make, x = NORMS[name]
        assert error_of(lambda: Scaled(x.shape[1:], make()), x, bits=4) < 0.1

    def test_rows_are_gathered_first(self):
        """As for the scores of links. Relative to groups of rows, the error was 1.5; it is 0.11
        where all rows have the same scale."""
        left, right = torch.randint(ROWS[0], (2, 4096), generator=seeded(4))
        scores = Of(lambda x: torch.cosine_similarity(x[left], x[right]))
        assert error_of(lambda: Scaled((64,), scores), of_scales(*ROWS, of=1), bits=4) < 0.2

    @pytest.mark.parametrize("norm", [torch.linalg.vector_norm, torch.nn.functional.normalize])
    @pytest.mark.parametrize("dim", [0, -1])
    def test_a_number_has_no_slices(self, norm, dim):
        """PyTorch takes these dimensions for it."""
        model = gact_graph.wrap(Scaled((), Of(lambda x: norm(x, dim=dim))), bits=4, min_bytes=0)
        model(torch.tensor(3.0)).backward()
        assert model.scale.grad == (3.0 if norm is torch.linalg.vector_norm else 0.0)

    @pytest.mark.parametrize("norm", [InstanceNorm, GraphNorm])
    def test_those_of_graphs(self, norm):
        """Made of single operations: squares, a sum, a quotient. Errors were 4.4 and 5.7, and 0.56
        where the means that GraphNorm multiplies by a number for each channel were not relative
        to the channel."""
        x = of_scales(64, 1024, of=1).t().contiguous()
        batch = torch.arange(1024) // 32
        options = {"affine": True} if norm is InstanceNorm else {}
        assert error_of(lambda: Scaled((64,), norm(64, **options)), x, batch, bits=4) < 0.2

    def test_means_that_are_large_beside_deviations(self):
        """They multiply the sum of the noise over a channel: the error was 0.38, and is 0.17 where
        means are 0."""
        x = 10 * torch.randn(64, generator=seeded(3)) + 0.1 * torch.randn(ROWS, generator=seeded(2))
        assert error_of(lambda: Scaled((64,), nn.BatchNorm1d(64)), x, bits=4) < 0.25

    def test_groups_of_features_with_large_means(self):
        """A softmax over four groups, of which each gets a share of the features: the error was
        1.6, because the noisy shares did not sum to 1."""
        x = 10 + 0.1 * torch.randn(ROWS, generator=seeded(2))
        assert error_of(lambda: Scaled((64,), DiffGroupNorm(64, 4)), x, bits=4) < 0.1


class TestVariance:
    @pytest.mark.parametrize("aggregators", [["mean", "std"], ["min", "max", "std"], ["var"]])
    def test_of_messages(self, aggregators):
        """A variance is a difference of squares, whose noise is far more than its own."""
        x, edge_index = graph()
        degrees = torch.bincount(degree(edge_index[1], len(x)).long())

        def net() -> nn.Module:
            return PNAConv(FEATURES, 32, aggregators, ["identity"], deg=degrees)

        only = {"*/mul*.input": 4, "*": 32}
        assert error_of(net, x, edge_index, bits=4, pin=only) < 0.02

    @pytest.mark.parametrize("make", [VarAggregation, StdAggregation])
    @pytest.mark.parametrize("means", [(1, 1), (1, 64), (512, 64)])
    def test_means_that_are_large_beside_deviations(self, make, means):
        """Backward took the difference of two products: the errors were 0.4 to 103."""
        index = torch.randint(512, (8192,), generator=seeded(4)).sort().values
        mean = 10 + (10 if means[1] > 1 else 0) * torch.randn(means, generator=seeded(3))
        x = 0.1 * torch.randn(8192, 64, generator=seeded(2))
        x = x + (mean[index] if len(mean) > 1 else mean)

        def net() -> nn.Module:
            return Scaled((64,), make())

        assert error_of(net, x, index, bits=4) < 0.1

    def test_in_a_layer(self):
        """Of PNA the error was 0.8."""
        x, edge_index = graph()
        x = 10 + 0.1 * x
        degrees = torch.bincount(degree(edge_index[1], len(x)).long())

        def net() -> nn.Module:
            return PNAConv(FEATURES, 32, ["std"], ["identity"], deg=degrees)

        assert error_of(net, x, edge_index, bits=4) < 0.15

    def test_forward_is_untouched(self):
        x, edge_index = graph()
        torch.manual_seed(0)
        conv = SAGEConv(FEATURES, 32, aggr="var", project=True)
        expected = conv(x, edge_index)
        got = gact_graph.wrap(conv, blocks=False, min_bytes=0)(x, edge_index)
        assert torch.equal(got, expected)

    def test_other_squares_keep_their_gradient(self):
        """Only PyG's mean of squares goes without one."""
        index = torch.arange(4096) % 64
        x = torch.randn(4096, 16, generator=seeded(2))

        def forward(module, x):
            h = x @ module.weight
            return module.aggregate(h, index) + (h * h).view(64, 64, -1).sum(1)

        def net() -> nn.Module:
            module = Lambda(forward)
            module.aggregate = VarAggregation()
            module.weight = nn.Parameter(torch.randn(16, 16, generator=seeded(1)))
            return module

        assert error_of(net, x, bits=8) < 0.02

    def test_messages_are_released_with_the_aggregation(self):
        index, held = torch.arange(4096) % 64, []

        def forward(module, x):
            out = module.aggregate(x @ module.weight, index)
            held.append(current.current()._variance)
            return out

        module = Lambda(forward)
        module.aggregate = VarAggregation()
        gact_graph.wrap(module, bits=4, min_bytes=0)(torch.randn(4096, FEATURES))
        assert held == [None]

    def test_a_second_backward_is_refused(self):
        index = torch.arange(4096) % 64
        model = gact_graph.wrap(Scaled((64,), VarAggregation()), min_bytes=0)
        out = model(torch.randn(4096, 64), index).square().sum()
        with pytest.warns(RuntimeWarning, match="create_graph=True read tensors"):
            [gradient] = torch.autograd.grad(out, model.scale, create_graph=True)
        with pytest.raises(RuntimeError, match=r"Expected one backward through module/.*mul"):
            gradient.sum().backward()

"""What may carry noise, held against the derivative formulas that torch ships."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torchgen

from gact_graph.capture.operations import LINEAR, TABLE, WITHIN
from gact_graph.codecs.reads import RELATIVE, VALUES

# Python names of what the formulas call otherwise.
NAMES = {
    **dict.fromkeys(("divide", "true_divide", "truediv", "itruediv"), "div"),
    **dict.fromkeys(("multiply", "rmul", "imul"), "mul"),
    **dict.fromkeys(("rmatmul", "linalg_matmul"), "matmul"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "convolution"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "convolution"),
    **dict.fromkeys(("batch_norm", "instance_norm"), "native_batch_norm"),
    **{"layer_norm": "native_layer_norm", "group_norm": "native_group_norm"},
    **{"softmax": "_softmax", "special_softmax": "_softmax", "special_expit": "sigmoid"},
    **{"log_softmax": "_log_softmax", "special_log_softmax": "_log_softmax"},
    **{"arctan": "atan", "selu": "elu", "bilinear": "_trilinear", "rdiv": "reciprocal"},
    **{"grid_sample": "grid_sampler_2d", "embedding_bag": "_embedding_bag"},
    **{"adaptive_avg_pool2d": "_adaptive_avg_pool2d", "pad": "reflection_pad1d"},
    **{"adaptive_avg_pool3d": "_adaptive_avg_pool3d", "rrelu": "rrelu_with_noise"},
    "scaled_dot_product_attention": "_scaled_dot_product_flash_attention_for_cpu",
}
# Made of others, which TestComposites finds in their graphs; or not of torch.
COMPOSITES = frozenset(
    {
        *("inner", "outer", "ger", "kron", "einsum", "tensordot", "linalg_vecdot"),
        *("linalg_multi_dot", "chain_matmul", "adaptive_avg_pool1d", "avg_pool1d", "rms_norm"),
        "square",
        *("spmm_sum", "spmm_mean", "segment_matmul", "grouped_matmul"),
    }
)
# Formulas that call a function which does no more than multiply by what it is given, look at its
# shape, or is smooth and bounded; or divide by what cannot be small.
READ = {
    "_adaptive_avg_pool2d_backward(grad, self)",
    "_adaptive_avg_pool3d_backward(grad, self)",
    "avg_pool2d_backward(grad, self, kernel_size, stride, padding, ceil_mode, "
    "count_include_pad, divisor_override)",
    "avg_pool3d_backward(grad, self, kernel_size, stride, padding, ceil_mode, "
    "count_include_pad, divisor_override)",
    "gather_backward(grad, self, dim, index, sparse_grad)",
    "take_backward(grad, self, index)",
    "masked_select_backward(grad, self, mask)",
    "reflection_pad1d_backward_symint(grad, self, padding)",
    "_embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, result1, mode, "
    "padding_idx)",
    "div_tensor_other_backward(grad, self, other)",
    "div_tensor_other_backward(grad, self, other, rounding_mode)",
    "mul_tensor_backward(grad, self, other.scalar_type())",
    "mul_tensor_backward(grad, other, self.scalar_type())",
    "matmul_backward(grad, self, other, grad_input_mask)",
    "mm_mat1_backward(grad, mat2, self.sym_sizes(), self.sym_strides(), self.layout(), 1)",
    "mm_mat2_backward(grad, self, mat2.sym_sizes(), mat2.sym_strides(), mat2.layout(), 1)",
    "mm_mat1_backward(grad, mat2, mat1.sym_sizes(), mat1.sym_strides(), mat1.layout(), alpha)",
    "mm_mat2_backward(grad, mat1, mat2.sym_sizes(), mat2.sym_strides(), mat2.layout(), alpha)",
    "var_backward(grad, self, dim, correction, keepdim)",
    "var_mean_backward(grads[0], grads[1], self, dim, correction, keepdim)",
    "std_backward(result, grad, self, dim, correction, keepdim)",
    "std_mean_backward(grads[0], grads[1], self, result0, dim, correction, keepdim)",
    "rrelu_with_noise_backward(grad, self, noise, lower, upper, training, false)",
    "sigmoid_backward(grad, result)",
    "tanh_backward(grad, result)",
    "_softmax_backward_data(grad, result, dim, self.scalar_type())",
    "gelu_backward(grad, self, approximate)",
    "glu_backward(grad, self, dim)",
    "softplus_backward(grad, self, beta, threshold)",
    "hardswish_backward(grad, self)",
    "elu_backward(grad, alpha, scale, input_scale, /* is_result */ false, self)",
    "elu_backward(grad, alpha, scale, input_scale, /* is_result */ true, result)",
    "elu_backward(grad, alpha, 1, 1.0/alpha.toFloat(), /* is_result */ false, self)",
    "elu_backward(grad, alpha, 1, 1.0/alpha.toFloat(), /* is_result */ true, result)",
    "GradMode::is_enabled() ? infinitely_differentiable_silu_backward(grad, self) : "
    "silu_backward(grad, self)",
    "GradMode::is_enabled() ? infinitely_differentiable_mish_backward(grad, self) : "
    "mish_backward(grad, self)",
    "2.0 / sqrt(M_PI) * exp(-(self.pow(2))) * grad",
    "-2.0 / sqrt(M_PI) * exp(-(self.pow(2))) * grad",
    "grad / (self * self + 1).conj()",
}
# The same, of which only the start is written here.
READ_STARTS = (
    "grad.defined() ? native_batch_norm_backward(",
    "grad.defined() ? native_layer_norm_backward_symint(",
    "GradMode::is_enabled() || grads[1].defined() || grads[2].defined() ? "
    "infinitely_differentiable_native_group_norm_backward(",
    "grad.defined() ? grid_sampler_2d_backward(",
    "grad.defined() ? convolution_backward_symint(",
    "grad.defined() ? linear_backward(",
    "_trilinear_backward(",
    "_embedding_bag_backward_symint(",
)
_PRODUCTS = re.compile(
    r"maybe_multiply|handle_r_to_c|at::linalg_cross|grad|conj|bmm|mv|ger|unsqueeze|expand_symint"
    r"|transpose|sym_size|scalar_type|toComplexDouble|toDouble|isComplex|t|sin|cos"
)


def formulas() -> dict[str, list[dict[str, str]]]:
    """By the function's name, for each overload, the formula of each of its arguments."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    found: dict[str, list[dict[str, str]]] = {}
    overload: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name = re.match(r"- name: (\w+)", line)
        if name:
            overload = {}
            found.setdefault(name[1], []).append(overload)
        formula = re.match(r"\s{2,6}([\w, ]+): (.+)", line)
        if formula and not formula[1].startswith(("output_diff", "result")):
            overload[formula[1]] = formula[2].strip("\"'")
    return found


FORMULAS = formulas()


def is_product(formula: str, name: str) -> bool:
    """Whether it multiplies, adds and transposes, no more, and divides by nothing saved."""
    calls = re.findall(r"([\w:]+)\s*\(", formula)
    divides = re.search(rf"/ *\(?[^)]*\b{name}\b", formula)
    compares = re.search(r"[<>=!]=|[<>]", formula)
    return all(_PRODUCTS.fullmatch(call) for call in calls) and not divides and not compares


def readers(name: str, position: str) -> list[tuple[str, str]]:
    """The formulas of the operation in which what lies at the position occurs, and as what."""
    entries = FORMULAS[NAMES.get(name, name)]
    if position == "result":
        entries = [*entries, *FORMULAS.get(f"{NAMES.get(name, name)}_", [])]
    variables = {
        "input": ("self", "input"),
        "result": ("result", "result0", "output"),
        WITHIN: ("noise",),
    }.get(position, (position,))
    return [
        (formula, variable)
        for entry in entries
        for formula in entry.values()
        for variable in variables
        if re.search(rf"\b{variable}\b(?!\.(scalar_type|sym_size|options))", formula)
    ]


def is_known(formula: str, variable: str) -> bool:
    return formula in READ or formula.startswith(READ_STARTS) or is_product(formula, variable)


PLAIN = [
    (name, position)
    for (name, position), reads in TABLE.items()
    if not reads.relative and reads.least_bits < 8 and name not in COMPOSITES
]


class TestFormulas:
    @pytest.mark.parametrize(("name", "position"), PLAIN)
    def test_what_gets_noise_is_multiplied_by_or_read_in_a_formula_that_we_know(
        self, name, position
    ):
        found = readers(name, position)
        assert found
        assert [formula for formula, variable in found if not is_known(formula, variable)] == []

    @pytest.mark.parametrize("name", sorted(LINEAR - COMPOSITES))
    def test_what_is_called_linear_is(self, name):
        entries = FORMULAS[NAMES.get(name, name)]
        names = {v for entry in entries for key in entry for v in key.split(", ")}
        for entry in entries:
            for formula in entry.values():
                assert all(is_known(formula, variable) for variable in names), formula

    @pytest.mark.parametrize(
        ("name", "position"),
        [key for key, reads in TABLE.items() if reads is RELATIVE and key[0] not in COMPOSITES],
    )
    def test_what_is_rounded_is_a_divisor_or_a_base(self, name, position):
        if position == WITHIN:  # rdiv: the reciprocal before it is multiplied
            position = "result"
        risky = (r"/", r"div\b", r"div_tensor", r"pow\(", r"\* result", r"std", r"log_softmax")
        assert any(re.search("|".join(risky), formula) for formula, _ in readers(name, position))

    @pytest.mark.parametrize("name", ["lgamma", "logsumexp", "cosh", "_euclidean_dist", "igamma"])
    def test_what_this_test_would_not_take(self, name):
        for overload in FORMULAS[name]:
            for variable in ("self", "other", "x1"):
                for formula in overload.values():
                    if re.search(rf"\b{variable}\b", formula) and "not_impl" not in formula:
                        assert not is_known(formula, variable)

    def test_a_name_that_is_not_listed_is_kept(self):
        assert ("logsumexp", "input") not in TABLE
        assert TABLE["exp", "result"] == VALUES


PRODUCTS = {
    "inner": torch.inner,
    "outer": lambda a, b: torch.outer(a[0], b[0]),
    "ger": lambda a, b: torch.ger(a[0], b[0]),
    "kron": torch.kron,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "linalg_vecdot": torch.linalg.vecdot,
    "linalg_multi_dot": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "chain_matmul": lambda a, b: torch.linalg.multi_dot([a, b]),
}


class TestComposites:
    @pytest.mark.parametrize("name", PRODUCTS)
    def test_are_made_of_products(self, name):
        a, b = torch.randn(2, 8, 8)
        found, waiting = set(), [PRODUCTS[name](a.requires_grad_(), b.requires_grad_()).grad_fn]
        while waiting:
            node = waiting.pop()
            if any(entry.startswith("_raw_saved") for entry in dir(node)):
                found.add(re.sub(r"Backward\d+$", "", node.name()).lower())
            waiting += [following for following, _ in node.next_functions if following]
        assert found
        assert found <= LINEAR

"""Tensors that may carry noise, checked against torch's derivative formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torchgen

from gact_graph.capture.nodes import attributes_of
from gact_graph.capture.operations import LINEAR, TABLE
from gact_graph.codecs.reads import RELATIVE, VALUES

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
    # Since torch 2.15:
    "M_2_SQRTPI * exp(-(self.pow(2))) * grad",
    "-M_2_SQRTPI * exp(-(self.pow(2))) * grad",
}
# The same, of which only the start is written here.
READ_STARTS = (
    "mm_mat1_sparse_backward(",
    "reflection_pad",
    "replication_pad",
    "rrelu_with_noise_backward(",
    "grad.defined() ? _prelu_kernel_backward(",
    "grad.defined() ? native_batch_norm_backward(",
    "grad.defined() ? native_layer_norm_backward_symint(",
    "GradMode::is_enabled() || grads[1].defined() || grads[2].defined() ? "
    "infinitely_differentiable_native_group_norm_backward(",
    "GradMode::is_enabled() || grads[1].defined() || grads[2].defined() ? "
    "native_group_norm_backward_dispatcher(",  # since torch 2.15
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
    """By the operation's name, for each overload, the formula of each of its arguments.

    Names have no underscores: a node's has none either.
    """
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    actual: dict[str, list[dict[str, str]]] = {}
    overload: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name = re.match(r"- name: (\w+)", line)
        if name:
            overload = {}
            actual.setdefault(name[1].replace("_", ""), []).append(overload)
        formula = re.match(r"\s{2,6}([\w, ]+): (.+)", line)
        if formula and not formula[1].startswith(("output_diff", "result")):
            overload[formula[1]] = formula[2].strip("\"'")
    return actual


FORMULAS = formulas()


def is_product(formula: str, name: str) -> bool:
    """Whether it multiplies, adds and transposes, no more, and divides by nothing saved."""
    calls = re.findall(r"([\w:]+)\s*\(", formula)
    divides = re.search(rf"/ *\(?[^)]*\b{name}\b", formula)
    compares = re.search(r"[<>=!]=|[<>]", formula)
    return all(_PRODUCTS.fullmatch(call) for call in calls) and not divides and not compares


def entries_of(name: str) -> list[dict[str, str]]:
    return FORMULAS[name.replace("_", "")]


def readers(name: str, tensor: str) -> list[str]:
    """The formulas of the operation in which the tensor occurs."""
    read = re.compile(rf"\b{tensor}\b(?!\.(scalar_type|sym_size|options))")
    formulas = [formula for entry in entries_of(name) for formula in entry.values()]
    return [formula for formula in formulas if read.search(formula)]


def is_known(formula: str, variable: str) -> bool:
    return formula in READ or formula.startswith(READ_STARTS) or is_product(formula, variable)


PLAIN = [key for key, reads in TABLE.items() if not reads.relative and reads.least_bits < 8]


class TestFormulas:
    @pytest.mark.parametrize(("name", "tensor"), PLAIN)
    def test_tensors_with_noise_are_factors_or_in_a_known_formula(self, name, tensor):
        actual = readers(name, tensor)
        assert actual
        assert [formula for formula in actual if not is_known(formula, tensor)] == []

    @pytest.mark.parametrize("name", sorted(LINEAR))
    def test_operations_called_linear_are_linear(self, name):
        entries = entries_of(name)
        names = {v for entry in entries for key in entry for v in key.split(", ")}
        for entry in entries:
            for formula in entry.values():
                assert all(is_known(formula, variable) for variable in names), formula

    @pytest.mark.parametrize(
        ("name", "tensor"), [key for key, reads in TABLE.items() if reads is RELATIVE]
    )
    def test_rounded_tensors_are_divisors_or_bases(self, name, tensor):
        risky = (r"/", r"div\b", r"div_tensor", r"pow\(", r"\* result", r"std", r"log_softmax")
        assert any(re.search("|".join(risky), formula) for formula in readers(name, tensor))

    @pytest.mark.parametrize("name", ["lgamma", "logsumexp", "cosh", "_euclidean_dist", "igamma"])
    def test_formulas_that_this_test_refuses(self, name):
        for overload in entries_of(name):
            for variable in ("self", "other", "x1"):
                for formula in overload.values():
                    if re.search(rf"\b{variable}\b", formula) and "not_impl" not in formula:
                        assert not is_known(formula, variable)

    def test_a_name_that_is_not_listed_is_kept(self):
        assert ("logsumexp", "self") not in TABLE
        assert TABLE["expm1", "result"] == VALUES


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
        since = torch.autograd._get_sequence_nr()
        result = PRODUCTS[name](a.requires_grad_(), b.requires_grad_())
        actual = {place.operation for place in attributes_of(result, since).values()}
        assert actual
        assert actual <= LINEAR

"""Parts of PyG 2.6 that fail with later versions of torch and NumPy: their tests are skipped."""

import numpy as np
import pytest
import torch.fx
import torch_geometric

IS_OLD = torch_geometric.__version__.startswith("2.6.")


def needs_to_hetero() -> None:
    """Skip the test if ``to_hetero`` reads a name that torch.fx no longer has."""
    if IS_OLD and not hasattr(torch.fx._symbolic_trace, "Union"):
        pytest.skip("to_hetero of PyG 2.6 needs an older torch")


def needs_dimenet() -> None:
    """Skip the test if DimeNet reads a name that NumPy 2 no longer has."""
    if IS_OLD and not hasattr(np, "math"):
        pytest.skip("DimeNet of PyG 2.6 needs an older NumPy")

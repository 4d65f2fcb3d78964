"""Settings of all tests."""

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

# Workers of one run share the processors.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # of processes of tests

# The same examples at every run; `make attack` draws others. Time proves nothing on a busy machine.
settings.register_profile(
    "repeatable", derandomize="GACT_GRAPH_ATTACK" not in os.environ, deadline=None
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let each test draw the same numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Exclude what is there before a file from garbage collection, whose time it would multiply."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def backend() -> Iterator[Any]:
    """Count the graphs of a compiler that runs them as they are."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


@pytest.fixture
def decomposed(backend: Any) -> Any:
    """Cut graphs as inductor does, whose sums of rows on a CPU have another order in each run."""
    return type(backend)("aot_eager_decomp_partition")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))

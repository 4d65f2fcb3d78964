"""Activation compressed training of graph neural networks: wrap a model to train in less memory."""

import sys

from gact_graph.support.versions import check_versions

check_versions()  # before modules that would fail with less to read

from gact_graph.api import distributed
from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.plan import MemoryBudgetError, Plan
from gact_graph.api.message_passing import message_passing
from gact_graph.api.report import Report
from gact_graph.api.wrap import (
    compress,
    estimate,
    load_state_dict,
    plan,
    report,
    state_dict,
    unwrap,
    wrap,
)

__version__ = "0.8.0"

__all__ = [
    "Estimate",
    "MemoryBudgetError",
    "Plan",
    "Report",
    "__version__",
    "compress",
    "distributed",
    "estimate",
    "load_state_dict",
    "message_passing",
    "plan",
    "report",
    "state_dict",
    "unwrap",
    "wrap",
]

# `from gact_graph.distributed import partition` works without a package for two functions, as
# `os.path` does.
sys.modules[f"{__name__}.distributed"] = distributed

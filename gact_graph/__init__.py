"""Activation compressed training for graph networks: wrap a model and train it in less memory."""

from gact_graph.api import compress, load_state_dict, report, state_dict, unwrap, wrap
from gact_graph.report import Report

__version__ = "0.6.0"

__all__ = [
    "Report",
    "__version__",
    "compress",
    "load_state_dict",
    "report",
    "state_dict",
    "unwrap",
    "wrap",
]

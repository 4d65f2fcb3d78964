"""Activation compressed training for graph networks: wrap a model and train it in less memory."""

from gact_graph.api import compress, report, unwrap, wrap
from gact_graph.report import Report

__version__ = "0.2.0"

__all__ = ["Report", "__version__", "compress", "report", "unwrap", "wrap"]

"""The report on the memory of a forward: as numbers, a table, a page and a bar chart.

``report`` has the numbers; ``table``, ``figures`` and ``page`` show them; ``contexts`` sums them by
layer; ``names`` formats slots and bytes. ``sheet`` and ``curves`` show plans and estimates, too.

Not here: how the numbers are taken (:mod:`gact_graph.capture.ledger`).
"""

from gact_graph.api.report.names import format_bytes
from gact_graph.api.report.report import Report

__all__ = ["Report", "format_bytes"]

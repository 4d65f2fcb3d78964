"""Where the memory of a forward went: as numbers, a table, a page, a picture.

Not here: how the numbers are taken (:mod:`gact_graph.capture.ledger`).
"""

from gact_graph.api.report.report import Report
from gact_graph.api.report.units import format_bytes

__all__ = ["Report", "format_bytes"]

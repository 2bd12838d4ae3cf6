"""The report: one HTML file about one run, or about several side by side, that opens from disk without a network.

collect.py reads run directories, columns.py and charts.py make curves of their rows, groups.py chooses what to show of
the responses, summary.py says it in a few numbers, page.py puts all of it into one file; assets/ is what the browser
runs. BokehJS draws the curves: it comes with a Python package, so nothing is fetched when a report is built or opened.
"""

from cluster.run.report.page import build_report

__all__ = ["build_report"]

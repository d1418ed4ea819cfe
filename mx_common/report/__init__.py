"""A page that shows what a run's records say: the verdict in words, rates, stages, sources, links.

    text = page_of(evidence, outcome)          # what mx report and mx gate --html write

Invariant: one file without a network, however large the run; whatever a record says is shown as text.
"""

from mx_common.report.page import page_of, render
from mx_common.report.tables import Report, tabulate

__all__ = ["Report", "page_of", "render", "tabulate"]

"""The form of a study: what a file of your own imports."""

from pfedhn.experiments.finished import Finished
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study

__all__ = ["Finding", "Finished", "Found", "Study"]

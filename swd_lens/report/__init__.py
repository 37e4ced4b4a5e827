"""Reports: a finished `Run` as one HTML file that opens anywhere, without a network and without scripts."""

from swd_lens.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]

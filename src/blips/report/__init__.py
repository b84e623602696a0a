"""Reports: a run as one HTML file that opens from disk, without a network.

    blips.report.write_report("runs/demo", "report.html")

`sources` finds what there is to report on, `plots` and `structures` turn predictions into data,
`document` makes the page of it. Nothing in a page is loaded from elsewhere: its content security
policy allows the embedded scripts by their hashes, and nothing else.
"""

from blips.report.write import write_report

__all__ = ["write_report"]

"""Reports: a run as one HTML file that opens from disk, without a network.

    blips.report.write_report("runs/blips", "report.html")

`sources` finds what there is to report on, `structures` what the 3D view shows, `write` and
`campaign` make pages of it with the parts of `document`. Nothing in a page is loaded from
elsewhere: its content security policy allows the embedded scripts by their hashes, nothing else.
"""

from blips.report.write import write_report

__all__ = ["write_report"]

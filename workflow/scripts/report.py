"""The run on one page."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.report import Contents, write_report

    page = Path(snakemake.output[0])
    write_report(page, page.parent, Contents(**snakemake.params.contents))

"""The table of deployed methods on rows."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.audit import write_audit_table

    params = snakemake.params
    folder = Path(snakemake.output.csv).parent
    write_audit_table(list(snakemake.input), folder, params.run, params.labels, params.statistics, apart=params.apart)

"""The table of native budgets."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.native import write_native_table

    params = snakemake.params
    folder = Path(snakemake.output.csv).parent
    write_native_table(list(snakemake.input), folder, params.run, params.labels, params.statistics)

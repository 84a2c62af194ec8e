"""The table of exact kappa."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.exhaustive import write_exact_table

    params = snakemake.params
    folder = Path(snakemake.output.csv).parent
    write_exact_table(list(snakemake.input), folder, params.run, params.labels, params.statistics, apart=params.apart)

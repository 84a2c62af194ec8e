"""The structured contexts against the registered bounds, and against the generic contexts."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.structured import write_structured_tables

    params = snakemake.params
    write_structured_tables(
        snakemake.input.structured,
        snakemake.input.generic,
        snakemake.input.bounds,
        Path(snakemake.output.csv[0]).parent,
        params.run,
        params.labels,
        params.statistics,
        params.apart,
    )

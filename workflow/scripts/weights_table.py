"""The table of free weights."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.weights import write_weights_table

    params = snakemake.params
    folder = Path(snakemake.output.csv).parent
    write_weights_table(list(snakemake.input), folder, params.run, params.labels, params.statistics, apart=params.apart)

"""Every table of the benchmark from its answers."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.tables import write_benchmark_tables

    params = snakemake.params
    folder = Path(snakemake.output.csv[0]).parent
    write_benchmark_tables(snakemake.input[0], folder, params.run, params.labels, params.comparisons)

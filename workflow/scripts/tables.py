"""Every table of a run from its instances."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.instances import read_instances
    from contourkv.statistics.tables import build_tables, write_tables

    params = snakemake.params
    frame, metadata = read_instances(snakemake.input[0])
    settings = {"labels": params.labels, "families": params.families, "apart": params.apart}
    tables = build_tables(frame, **params.statistics, **settings)
    metadata |= {"run": params.run, "statistics": params.statistics}
    write_tables(tables, Path(snakemake.output.csv[0]).parent, metadata)

"""The paper's figures beside those of this run, claim by claim."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.instances import read_instances
    from contourkv.statistics.summary import write_summary
    from contourkv.statistics.tables import read_tables

    _, metadata = read_instances(snakemake.input.instances)
    metadata |= {"run": snakemake.params.run, "statistics": snakemake.params.statistics}
    write_summary(snakemake.output[0], read_tables(Path(snakemake.input.tables[0]).parent), metadata)

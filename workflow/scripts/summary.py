"""The paper's figures beside those of this run, claim by claim."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.verdicts import verdict_section
    from contourkv.statistics.instances import read_instances
    from contourkv.statistics.summary import write_summary
    from contourkv.statistics.tables import read_tables

    _, metadata = read_instances(snakemake.input.instances)
    metadata |= {"run": snakemake.params.run, "statistics": snakemake.params.statistics}
    tables = read_tables(Path(snakemake.input.tables[0]).parent)
    downstream = [verdict_section(read_tables(Path(path).parent)) for path in snakemake.input.benchmark[:1]]
    write_summary(snakemake.output[0], tables, metadata, downstream)

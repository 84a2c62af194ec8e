"""The paper's figures beside those of this run: by subject, and claim by claim."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.verdicts import verdict_section
    from contourkv.statistics.instances import read_instances
    from contourkv.statistics.paper import write_paper
    from contourkv.statistics.summary import write_summary
    from contourkv.statistics.tables import read_table

    _, metadata = read_instances(snakemake.input.instances)
    metadata |= {name: snakemake.params[name] for name in ("run", "statistics", "trained")}
    named = [*snakemake.input.tables, *snakemake.input.more]
    tables = {Path(path).stem: read_table(path) for path in named}
    benchmark = {Path(path).stem: read_table(path) for path in snakemake.input.benchmark}
    write_summary(snakemake.output.summary, tables, metadata, [verdict_section(benchmark)] if benchmark else [])
    stem = Path(snakemake.output.paper).with_suffix("")
    write_paper(stem, tables, benchmark.get("verdicts"), snakemake.params.config_file, metadata)

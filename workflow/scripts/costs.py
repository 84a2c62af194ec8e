"""What the jobs of the run took, from Snakemake's records of them."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.job_costs import write_costs

    params, stem = snakemake.params, Path(snakemake.output.md).with_suffix("")
    records, logs = stem.parent / "benchmarks", Path(".snakemake/log")
    write_costs(stem, records, params.written, params.without, logs, params.run)

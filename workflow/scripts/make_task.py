"""One task of the benchmark in one model's tokens."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.configured import make_task_file

    params = snakemake.params
    make_task_file(
        Path(snakemake.input.model[0]).parent,
        params.settings,
        params.text_sources,
        Path(params.wheels),
        params.hashes,
        Path(params.hub_lock),
        snakemake.output[0],
        params.commit,
    )

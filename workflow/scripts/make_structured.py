"""Task-structured contexts of one arm, in one model's tokens."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.structured import make_structured_file

    params = snakemake.params
    make_structured_file(
        Path(snakemake.input.model[0]).parent,
        params.settings,
        params.rows,
        params.text_sources,
        Path(params.wheels),
        params.hashes,
        snakemake.output[0],
    )

"""Text windows of one arm, in one model's tokens."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.contexts import build_contexts, write_contexts

    params = snakemake.params
    contexts = build_contexts(
        Path(snakemake.input.tokenizer).parent,
        snakemake.wildcards.arm,
        params.text,
        Path(snakemake.input.wheel).parent,
        hashes=params.hashes,
        **params.windows,
    )
    write_contexts(snakemake.output[0], contexts, model=snakemake.wildcards.model, seed=params.windows["seed"])

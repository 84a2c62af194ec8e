"""Rows and values of every context of one model and arm: one shard a context."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.capture import capture_contexts
    from contourkv.devices import usable_device
    from contourkv.registered import registered

    bounds = snakemake.params.get("bounds")
    capture_contexts(
        Path(snakemake.input.model[0]).parent,
        snakemake.input.contexts,
        snakemake.params.positions,
        list(snakemake.output),
        device=usable_device(snakemake.params.device),
        model_name=snakemake.wildcards.model,
        about={"bounds": registered(bounds)} if bounds else None,
        made_by=[snakemake.params.code, snakemake.params.locked],
    )

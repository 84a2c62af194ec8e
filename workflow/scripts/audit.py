"""Deployed methods on the rows of one model and arm."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.audit import audit_file
    from contourkv.devices import usable_device

    audit_file(
        Path(snakemake.input.model[0]).parent,
        snakemake.input.contexts,
        snakemake.output[0],
        snakemake.params.settings,
        device=usable_device(snakemake.params.device),
        model_name=snakemake.wildcards.model,
        made_by=[snakemake.params.code, snakemake.params.locked],
    )

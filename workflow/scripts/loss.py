"""Losses in the forward pass of one model on one arm, the flat cells chosen on the run's other contexts."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.devices import usable_device
    from contourkv.loss import flat_cells, losses_file
    from contourkv.statistics.instances import read_instances

    params, model = snakemake.params, snakemake.wildcards.model
    frame, _ = read_instances(snakemake.input.instances)
    losses_file(
        Path(snakemake.input.model[0]).parent,
        snakemake.input.contexts,
        snakemake.output[0],
        flat_cells(frame, params.settings["s"], model=model),
        params.settings,
        device=usable_device(params.device),
        model_name=model,
        made_by=[params.code, params.locked],
    )

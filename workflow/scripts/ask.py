"""Every question of one task to every method, storage and budget; what is finished of a killed job is kept."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.running import run_task
    from contourkv.devices import usable_device

    run_task(
        Path(snakemake.input.model[0]).parent,
        snakemake.input.task,
        snakemake.output[0],
        snakemake.params.settings,
        device=usable_device(snakemake.params.device),
        model_name=snakemake.wildcards.model,
        made_by=[snakemake.params.code, snakemake.params.locked],
    )

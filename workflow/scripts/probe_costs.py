"""What each method costs when it runs alone: bytes at its peak and afterwards, seconds, tokens a second."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.costs import run_costs
    from contourkv.devices import usable_device

    run_costs(
        Path(snakemake.input.model[0]).parent,
        snakemake.input.task,
        snakemake.output[0],
        snakemake.params.settings,
        device=usable_device(snakemake.params.device),
        model_name=snakemake.wildcards.model,
        made_by=[snakemake.params.code, snakemake.params.locked],
    )

"""Every row of one model's short contexts, decided over all of its keys."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.devices import usable_device
    from contourkv.exhaustive import exact_file

    params = snakemake.params
    exact_file(
        list(snakemake.input.shards),
        snakemake.output[0],
        params.settings,
        params.enumeration,
        usable_device(params.device),
        made_by=[params.code, params.locked],
    )

"""All rows of one shard at all budgets, by every rule and exactly over the candidate families."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.devices import usable_device
    from contourkv.measurement import measure_file

    params = snakemake.params
    measure_file(snakemake.input[0], snakemake.output[0], params.enumeration, usable_device(params.device))

"""Free weights on a sample of one model's rows."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.weights import weigh_file

    params = snakemake.params
    made_by = [params.code, params.locked]
    weigh_file(list(snakemake.input.shards), snakemake.output[0], params.settings, made_by)

"""A sample of one model's rows at native budgets."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.native import native_file

    params = snakemake.params
    made_by = [params.code, params.locked]
    native_file(list(snakemake.input.shards), snakemake.output[0], params.settings, made_by)

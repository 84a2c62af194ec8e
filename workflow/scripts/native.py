"""A sample of one model's rows at native budgets."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.native import native_file

    native_file(list(snakemake.input.shards), snakemake.output[0], snakemake.params.settings)

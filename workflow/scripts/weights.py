"""Free weights on a sample of one model's rows."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.weights import weigh_file

    weigh_file(list(snakemake.input.shards), snakemake.output[0], snakemake.params.settings)

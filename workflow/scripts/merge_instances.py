"""The instances of all shards, and their certificates, as one checked table."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.merging import merge_instances

    merge_instances(list(snakemake.input.instances), list(snakemake.input.certificates), snakemake.output[0])

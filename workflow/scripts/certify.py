"""A sample of one model's rows at one budget, each decided over all of its keys."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.certification import certify_file

    certify_file(
        snakemake.input.shards,
        snakemake.input.instances,
        snakemake.output[0],
        snakemake.wildcards.model,
        int(snakemake.wildcards.budget),
        snakemake.params.certificate,
        snakemake.params.enumeration,
        made_by=[snakemake.params.code, snakemake.params.locked],
    )

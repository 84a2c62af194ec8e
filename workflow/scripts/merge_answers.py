"""All answers of a run, with the costs of their cells, in one table."""

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.benchmark.records import merge_answers

    merge_answers(snakemake.input.answers, snakemake.input.costs, snakemake.output[0])

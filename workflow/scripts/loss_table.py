"""The table of losses in the forward pass."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.statistics.losses import write_loss_table

    params = snakemake.params
    folder = Path(snakemake.output.csv).parent
    write_loss_table(list(snakemake.input), folder, params.run, params.labels, params.statistics)

"""One figure from its tables."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.figures import draw

    stem = Path(snakemake.output.pdf).with_suffix("")
    draw(snakemake.params.figure, Path(snakemake.input[0]).parent, stem)

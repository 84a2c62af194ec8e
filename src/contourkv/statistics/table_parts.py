"""Finished parts of a long job that are tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..parts import Parts
from .instances import read_columns, write_columns

if TYPE_CHECKING:
    import pandas as pd


class TableParts(Parts):
    """`Parts`, each a parquet file.

    Parameters
    ----------
    output, made_from : see `Parts`
    kinds : mapping
        Column -> dtype, see `statistics.instances.write_columns`.
    """

    def __init__(self, output: str | os.PathLike, made_from: object, kinds: Mapping[str, str]) -> None:
        super().__init__(output, made_from)
        self.kinds = dict(kinds)

    def has(self, name: str) -> bool:
        """Whether the table `name` is there, and whole."""
        try:
            self.read(name)
        except InvalidInput:
            return False
        return True

    def read(self, name: str) -> pd.DataFrame:
        """The table `name`; InvalidInput where it is not there, or not whole."""
        return read_columns(self.path(f"{name}.parquet"), {})[0]

    def write(self, name: str, table: pd.DataFrame) -> None:
        """Write the table `name`."""
        write_columns(self.path(f"{name}.parquet"), table, self.kinds, {})

    def table(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The table `name`, made and written if it is not there; either way, as it is read from its file."""
        if not self.has(name):
            self.write(name, make())
        return self.read(name)

"""The ratios of errors that the tables are made of."""

from __future__ import annotations

import numpy as np
import pandas as pd

FLAT = 1.11
"""Above this kappa-hat, selection has something to close (paper, section 3)."""
ATTAINED = 1e-12
"""Relative difference up to which two errors are the same kept set's."""
GAP = 1e-9
"""Share of es(A*_s) below which a gap counts as nothing to close."""


def derive(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the ratios of errors to instances (paper, sections 1 and 2).

    Parameters
    ----------
    frame : DataFrame
        Instances, with the columns `statistics.instances.MEASURED`.

    Returns
    -------
    DataFrame
        A copy with, all float64 unless said:

        - kappa_hat, kappa_best: es_max_mass / es_pool and / es_best; 1 where both are 0
        - c_hat, c_best: 1 - es_pool / es_max_mass and with es_best; 0 where es_max_mass is 0
        - attained, attained_best (bool): es_max_mass equals es_pool, es_best within 1e-12 relative
        - nothing_to_close, nothing_to_close_best (bool): the gap from es_max_mass down to es_mass_pool, to
          es_best is at most 1e-9 es_max_mass
        - recovered: share of es_max_mass - es_mass_pool that the swap rule closes over the same candidates; NaN
          where there is nothing to close
        - recovered_first, recovered_second, recovered_either: share of es_max_mass - es_best closed by the
          swap rule over all swap keys, from its first start, from its second, from the better of the two
    """
    out = frame.copy()
    mass = frame["es_max_mass"].to_numpy()
    for suffix, column in (("hat", "es_pool"), ("best", "es_best")):
        error = frame[column].to_numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            out[f"kappa_{suffix}"] = np.where((mass == 0) & (error == 0), 1.0, mass / error)
            out[f"c_{suffix}"] = np.where(mass == 0, 0.0, 1.0 - error / mass)
        out["attained" if suffix == "hat" else "attained_best"] = np.abs(mass - error) <= ATTAINED * mass
    for name, column in (("nothing_to_close", "es_mass_pool"), ("nothing_to_close_best", "es_best")):
        out[name] = mass - frame[column].to_numpy() <= GAP * mass

    def closed(by: np.ndarray, to: str, nothing: str) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (mass - by) / (mass - frame[to].to_numpy())
        return np.where(out[nothing], np.nan, share)

    first, second = frame["es_balance"].to_numpy(), frame["es_balance_second"].to_numpy()
    out["recovered"] = closed(frame["es_balance_pool"].to_numpy(), "es_mass_pool", "nothing_to_close")
    out["recovered_first"] = closed(first, "es_best", "nothing_to_close_best")
    out["recovered_second"] = closed(second, "es_best", "nothing_to_close_best")
    out["recovered_either"] = closed(np.minimum(first, second), "es_best", "nothing_to_close_best")
    return out

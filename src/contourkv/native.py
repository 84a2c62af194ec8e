"""Native budgets (paper, section 2, Table 1): what the swap rule still closes where a cache is really cut.

At s = 64 to 256 no pool can be enumerated; balance against max-mass, and the cap of Lemma 2.1 against what it is at a
small budget, can be measured on every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .capture.shard import Shard
from .errors import InvalidInput, InvariantBroken
from .measurement import measure_sample, measured_from, sample_parts
from .operator import Instance, dropped_mass, forced_error, spread
from .selectors.mass import max_mass
from .selectors.swap import balance
from .statistics.columns import NATIVE
from .statistics.instances import SLACK_ABSOLUTE, SLACK_RELATIVE, write_columns


def native_row(instance: Instance, budgets: Sequence[int], reference: int) -> list[dict[str, object]]:
    """One record a budget: the errors of max-mass and balance, and Lemma 2.1's cap there and at `reference`.

    Parameters
    ----------
    instance : Instance
    budgets : sequence of int
        Balance swaps among the max(256, 2 s) heaviest keys.
    reference : int
        The small budget that the cap is compared with.

    Raises
    ------
    InvalidInput
        A budget that is not below the row's number of keys.
    InvariantBroken
        Balance ends above max-mass, from where it starts.
    """
    twice = 2.0 * spread(instance)
    records = []
    for s in budgets:
        heaviest = forced_error(instance, max_mass(instance, s))
        swapped = forced_error(instance, balance(instance, s))
        if swapped > heaviest * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE:
            raise InvariantBroken(f"s = {s}: balance has the error {swapped:.17g}, max-mass {heaviest:.17g}")
        records.append(
            {
                "s": s,
                "visible": instance.size,
                "es_max_mass": heaviest,
                "es_balance": min(swapped, heaviest),
                "dropped_mass": dropped_mass(instance, s),
                "bound": twice * dropped_mass(instance, s),
                "reference_s": reference,
                "reference_bound": twice * dropped_mass(instance, reference),
            }
        )
    return records


def native_file(shard_paths: Sequence[str | Path], output: str | Path, settings: Mapping, made_by: object = "") -> None:
    """Measure a seeded sample of one model's rows at native budgets; write parquet, see `statistics.columns.NATIVE`.

    Parameters
    ----------
    shard_paths : all of the model's contexts
    settings : the config section `native`: budgets, reference, rows (drawn of each context, or null for all), seed
    made_by : digest of the code that computes this; parts of another are not used

    Raises
    ------
    InvalidInput
        A broken shard; a context whose rows are none, for all of its layers and positions, longer than a budget.
    InvariantBroken
        See `native_row`.
    """
    budgets, reference = settings["budgets"], settings["reference"]
    with sample_parts(shard_paths, output, settings, NATIVE, made_by) as parts:
        frame = measure_sample(
            shard_paths,
            lambda row: native_row(row, [s for s in budgets if s < row.size], reference),
            "native budgets",
            settings["rows"],
            settings["seed"],
            parts=parts,
        )
        meta = Shard(shard_paths[0]).metadata
        missing = set(budgets) - set(frame["s"] if len(frame) else ())
        if missing:
            raise InvalidInput(
                f"config key native.budgets: no row of {meta['model']} sees more than {min(missing)} keys; take longer "
                "contexts, later capture.positions or smaller budgets"
            )
        write_columns(output, frame, NATIVE, measured_from(meta, {"native": settings}, native=settings["seed"]))

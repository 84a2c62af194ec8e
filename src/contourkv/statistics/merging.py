"""The instances of all shards, with their certificates, as one checked table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from ..errors import InvalidInput
from ..provenance import VERSION
from .instances import CERTIFIED, KEYS, MEASURED, SLACK_RELATIVE, check_invariants, read_columns, where, write_instances


def merge_instances(
    instance_files: Sequence[str | os.PathLike],
    certificate_files: Sequence[str | os.PathLike],
    output: str | os.PathLike,
) -> None:
    """Join the parquet files of all shards, and their certificates, into one checked table.

    es_best and best are brought down to the certificate's error where that is less. The rows are sorted, the
    provenance of all files is combined; the same files give the same bytes.

    Parameters
    ----------
    instance_files : paths of shards' instances, columns of `MEASURED`
    certificate_files : paths of certificates, columns of `KEYS` and `CERTIFIED`; may be none
    output : path of the joined table

    Raises
    ------
    InvalidInput
        A file that is missing, truncated, not ours or without a column; a row that comes twice; a certificate
        of an instance that is not there.
    InvariantBroken
        See `check_invariants`; nothing is written then.
    """
    if not instance_files:
        raise InvalidInput("merge: no instance files given; run the enumeration first")
    frames, records = _read_all(instance_files, MEASURED)
    frame = pd.concat(frames, ignore_index=True)
    _refuse_twice(frame, "instances", instance_files)
    if certificate_files:
        frames, more = _read_all(certificate_files, {**{key: MEASURED[key] for key in KEYS}, **CERTIFIED})
        records += more
        certificates = pd.concat(frames, ignore_index=True)
        _refuse_twice(certificates, "certificates", certificate_files)
        frame = frame.merge(certificates, on=KEYS, how="left", indicator="joined")
        if int((frame.pop("joined") == "both").sum()) < len(certificates):
            stray = certificates.merge(frame[KEYS], on=KEYS, how="left", indicator="joined")
            stray = stray[stray["joined"] == "left_only"]
            raise InvalidInput(
                f"certificates: {where(stray.iloc[0])} is not among the instances; delete the certificate "
                "files and run certify again"
            )
    else:
        frame = frame.assign(**{name: np.nan for name in CERTIFIED})
    frame["certificate"] = frame["certificate"].astype(object).where(frame["certificate"].notna(), "")
    frame["certificate_proved"] = (frame["certificate_proved"] == True).to_numpy(bool)  # noqa: E712
    better = frame["es_certified"].to_numpy() < frame["es_best"].to_numpy() * (1 - SLACK_RELATIVE)
    frame["es_best"] = np.where(better, frame["es_certified"], frame["es_best"])
    frame["best"] = np.where(better, "certificate", frame["best"].astype(object))
    frame = frame.sort_values(KEYS, kind="stable", ignore_index=True)
    check_invariants(frame)
    write_instances(output, frame, combine(records))


def read_many(paths: Sequence[str | os.PathLike], wanted: dict[str, str]) -> tuple[pd.DataFrame, dict]:
    """The parquet files of many jobs below one another, with their combined provenance; see `read_columns`."""
    frames, records = _read_all(paths, wanted)
    return pd.concat(frames, ignore_index=True), combine(records)


def combine(records: Iterable[dict]) -> dict:
    """One provenance from those of many files: distinct models, config digests, versions; devices and seeds by name."""
    models: dict[str, dict] = {}
    configs: set[str] = set()
    versions: set[str] = set()
    seeds: dict[str, set] = {}
    bounds: set[str] = set()
    devices: dict[str, set[str]] = {}
    for entry in records:
        bounds |= {str(entry["bounds"])} if "bounds" in entry else set()
        versions.add(str(entry.get("contourkv", entry.get("version", "unknown"))))
        if "config" in entry:
            configs.add(str(entry["config"]))
        model = entry.get("model")
        if model is not None:
            model = model if isinstance(model, dict) else {"name": str(model)}
            models[json.dumps(model, sort_keys=True)] = model
        for part, device in (entry.get("devices") or {}).items():
            devices.setdefault(part, set()).update([device] if device else [])
        for name, seed in (entry.get("seeds") or {}).items():
            seeds.setdefault(str(name), set()).add(seed)
    return {
        "contourkv": VERSION,
        "made_with": sorted(versions),
        "config": sorted(configs),
        "models": [models[key] for key in sorted(models)],
        "seeds": {
            name: values.pop() if len(values) == 1 else sorted(values, key=str)
            for name, values in sorted(seeds.items())
        },
        **({"devices": {part: sorted(names) for part, names in sorted(devices.items())}} if devices else {}),
        **({"bounds": sorted(bounds)} if bounds else {}),
    }


def _read_all(paths: Sequence[str | os.PathLike], wanted: dict[str, str]) -> tuple[list[pd.DataFrame], list[dict]]:
    frames, records = [], []
    for path in paths:
        frame, metadata = read_columns(path, wanted)
        # A shard may carry empty certificate columns; those of the certificate files replace them.
        spare = [name for name in CERTIFIED if name in frame and name not in wanted]
        frames.append(frame.drop(columns=spare).astype({k: object for k, v in wanted.items() if v == "category"}))
        records.append(metadata)
    return frames, records


def _refuse_twice(frame: pd.DataFrame, what: str, paths: Sequence[str | os.PathLike]) -> None:
    twice = frame.duplicated(KEYS)
    if twice.any():
        row = frame[twice].iloc[0]
        raise InvalidInput(
            f"{what}: {where(row)} comes twice among {len(paths)} files ({paths[0]} ...); give each file once"
        )

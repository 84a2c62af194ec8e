"""Columns of what the parts of the measurement write, name -> dtype; what reads them need not know the tables.

A measurement that imported its table's module would run again whenever a table changes.
"""

from .instances import INSTANCE

NATIVE = {
    **INSTANCE,
    "visible": "int32",
    "es_max_mass": "float64",
    "es_balance": "float64",
    "dropped_mass": "float64",
    "bound": "float64",
    "reference_s": "int32",
    "reference_bound": "float64",
}
"""Columns of the instances at native budgets, one row an attention row and budget."""

WEIGHED = {
    **INSTANCE,
    "visible": "int32",
    "pool_keys": "int32",
    "es_pool": "float64",
    "ef_pool": "float64",
    "ef_lower": "float64",
    "ef_exact": "bool",
    "es_max_mass": "float64",
    "es_balance": "float64",
    "es_geometric": "float64",
    "mass_geometric": "float64",
}
"""Columns of the weighed rows, one row an attention row and budget; see `contourkv.weights`."""

EXACT = {
    **INSTANCE,
    "visible": "int32",
    "es_max_mass": "float64",
    "es_pool": "float64",
    "es_balance": "float64",
    "dropped_mass": "float64",
    "es_exact": "float64",
    "exact_proved": "bool",
    "exact_mass": "float64",
    "exact_max_rank": "int32",
    "exact_method": "category",
    "es_floor": "float64",
    "floor_proved": "bool",
    "floor_mass": "float64",
    "floor_max_rank": "int32",
    "floor_method": "category",
}
"""Columns of the rows decided over all keys, one row an attention row; see `contourkv.exhaustive`."""

AUDITED = {
    **INSTANCE,
    "method": "category",
    "es": "float64",
    "mass": "float64",
    "es_max_mass": "float64",
    "es_pool": "float64",
    "dropped_mass": "float64",
    "spread": "float64",
}
"""Columns of the verdicts, one row an attention row, budget and method; see `contourkv.audit`."""

LOSSES = {
    "model": "category",
    "arm": "category",
    "input": "category",
    "variant": "category",
    "s": "int32",
    "candidates": "int32",
    "start": "int32",
    "tokens": "int32",
    "nats": "float64",
    "flat_cells": "int32",
    "cells": "int32",
}
"""Columns of the losses in the forward pass, one row a context and variant; see `contourkv.loss`."""

VARIANTS = ("dense", "max_mass", "balance", "flat_balance")
"""All cells by one rule; the last is balance on the flat cells and max-mass on the rest."""

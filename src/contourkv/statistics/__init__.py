"""From instances to tables: kappa-hat, c-hat, AUC, Spearman, with intervals over inputs; pandas in, pandas out."""

from ..lazy import loader

_HOME = {
    "Estimate": "bootstrap",
    "Scope": "bootstrap",
    "auc": "estimators",
    "spearman": "estimators",
    "weighted_auc": "estimators",
    "weighted_quantiles": "estimators",
    "weighted_share": "estimators",
    "weighted_spearman": "estimators",
    "check_invariants": "instances",
    "merge_instances": "merging",
    "read_instances": "instances",
    "write_instances": "instances",
    "derive": "ratios",
    "build_tables": "tables",
    "provenance_line": "tables",
    "read_table": "tables",
    "read_tables": "tables",
    "write_tables": "tables",
    "build_summary": "summary",
    "write_summary": "summary",
}
__all__ = list(_HOME)

__getattr__ = loader(__name__, _HOME)

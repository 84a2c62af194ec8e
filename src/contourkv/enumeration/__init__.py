"""Exact best kept sets: over a pool, and a certificate over all keys."""

from importlib import import_module

_HOME = {
    "MassPool": "pool",
    "Neighbourhood": "pool",
    "PoolResult": "pool",
    "best_in_pool": "pool",
    "best_in_families": "pool",
    "Certificate": "certificate",
    "certify": "certificate",
    "certify_sample": "certificate",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'contourkv.enumeration' has no attribute {name!r}")
    return getattr(import_module(f"contourkv.enumeration.{_HOME[name]}"), name)

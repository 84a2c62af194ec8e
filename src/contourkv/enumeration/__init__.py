"""Exact best kept sets: over a pool, and a certificate over all keys."""

from ..lazy import loader

_HOME = {
    "MassPool": "pool",
    "Neighbourhood": "pool",
    "PoolResult": "pool",
    "best_in_pool": "pool",
    "best_in_families": "pool",
    "AllKeys": "halves",
    "best_of_all": "halves",
    "Certificate": "certificate",
    "certify": "certificate",
    "certify_sample": "certificate",
    "FreeError": "free",
    "FreeResult": "free",
    "best_free": "free",
    "free_error": "free",
    "price": "free",
}
__all__ = list(_HOME)

__getattr__ = loader(__name__, _HOME)

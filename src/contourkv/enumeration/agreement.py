"""Three ways to the same optimum: every subset, branch and bound, and OR-Tools' CP-SAT, on a row cut to few keys."""

from __future__ import annotations

from ..errors import InvariantBroken
from ..operator import Instance
from .certificate import certify
from .pool import best_in_pool

EXTRA_KEYS = 8
"""Keys beyond the budget that the cut row has: CP-SAT mostly ends within seconds there."""


def methods_agree(instance: Instance, s: int, time_limit: float, tolerance: float) -> bool:
    """Whether CP-SAT proved, in time, the optimum that the other two find on the s + 8 heaviest keys.

    The row is cut to these keys and its weights divided by their sum, so that all three search the same sets.

    Parameters
    ----------
    instance : Instance of more than s keys
    s, time_limit, tolerance : see `certify`

    Returns
    -------
    bool
        False if CP-SAT or the branch and bound ran out of time, which is no verdict.

    Raises
    ------
    InvariantBroken
        Two methods that both ended differ by more than the tolerance allows.
    """
    keys = instance.order[: s + EXTRA_KEYS]
    mass = instance.p[keys]
    row = Instance(mass / mass.sum(), instance.v[keys])
    start = row.order[:s]
    exact = best_in_pool(row, s, row.size).error
    proofs = {method: certify(row, s, start, time_limit, tolerance, method=method) for method in ("branch", "outer")}
    for method, proof in proofs.items():
        # What float64 cannot resolve is no difference.
        room = 2 * tolerance * exact + 1e-12 * float(abs(row.v).max())
        if proof.error < exact - room or (proof.proved and proof.error > exact + room):
            raise InvariantBroken(
                f"s = {s} on {row.size} keys: all subsets give the least error {exact:.17g}, {method} "
                f"{'proves' if proof.proved else 'finds'} {proof.error:.17g}; one of them is wrong: please report it "
                "(certificate.cross_check: 0 goes on without this check)"
            )
    return all(proof.proved for proof in proofs.values())

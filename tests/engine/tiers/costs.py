"""Tiny models compute sooner than they load on a busy machine; tests of what is loaded want it all the same."""

from engine.rates import Rate
from engine.tiers.kv_tiers import KvTiers


def load_whatever_it_costs(tiers: KvTiers | None) -> None:
    """From now on computing is taken to be very slow, whatever is measured."""
    if tiers is not None:
        for costs in (*tiers.costs.values(), *(() if tiers.store is None else (tiers.store.costs,))):
            costs.prefill = Rate(1e-3, 1e9)

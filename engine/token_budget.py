"""How one step's tokens are shared between prompts: evenly, so that short ones are not stuck behind long ones."""

from collections.abc import Sequence


def water_fill(budget: int, demands: Sequence[int]) -> list[int]:
    """Shares of `budget` tokens, in the order of `demands`, none above its demand.

    Every demand is raised evenly until it is met or the budget is spent (max-min fairness); what cannot be divided
    goes to the front. With budget 8:  demands 2, 9, 9  ->  shares 2, 3, 3.
    """
    shares = [0] * len(demands)
    by_demand = sorted(range(len(demands)), key=lambda i: (demands[i], i))
    for met, i in enumerate(by_demand):
        level, extra = divmod(budget, len(by_demand) - met)
        if demands[i] > level:
            for position, j in enumerate(sorted(by_demand[met:])):
                shares[j] = min(demands[j], level + (position < extra))
            break
        shares[i] = demands[i]
        budget -= demands[i]
    return shares


def share_fairly(budget: int, demands: Sequence[int], tenants: Sequence[str]) -> list[int]:
    """As `water_fill`, but first between tenants, then between the demands of each.

    With budget 8:  A 9, A 9, B 9  ->  shares 2, 2, 4.
    """
    members: dict[str, list[int]] = {}
    for i, tenant in enumerate(tenants):
        members.setdefault(tenant, []).append(i)
    if len(members) <= 1:
        return water_fill(budget, demands)
    shares = [0] * len(demands)
    of_tenants = water_fill(budget, [sum(demands[i] for i in own) for own in members.values()])
    for own, of_tenant in zip(members.values(), of_tenants, strict=True):
        for i, share in zip(own, water_fill(of_tenant, [demands[i] for i in own]), strict=True):
            shares[i] = share
    return shares

"""How one step's tokens are shared between prompts: so that many are not late for the sake of a few, and none starves.

    tenants            evenly
    a tenant's own     half to the prompt in front, what is left to those that need fewest tokens until they are done

Equal prompts are computed one after the other, since the one that has begun needs fewer tokens: the same work as in
turns, with first tokens that come half as late in the mean. A short prompt shares a step with one long one, however
many there are. And whoever is in front gets half of the tokens: nobody's first token comes later than first come, first
served would bring it in twice the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt wants of a step: at most `num_wanted` tokens. Beside the one in front, low `urgency` goes first.

    `next_block` is the key of the block that it computes next: prompts with the same one have everything up to there in
    common, and only one of a tenant's computes it. None: this one does, whoever else.
    """

    num_wanted: int
    tenant: str = ""
    urgency: tuple[int, int] = (0, 0)
    next_block: bytes | None = None


def share_out(budget: int, prompts: Sequence[Prompt]) -> list[int]:
    """Each prompt's tokens, in the order of `prompts`, which is that of rank: the first of each tenant is in front.

    With budget 8:  A wants 9, 9 and 2, B wants 9  ->  2, 0, 2, 4.
    Less than the budget is given out where prompts wait for what others of their tenant compute.
    """
    members: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(prompt.tenant, []).append(i)
    of_tenants = water_fill(budget, [_demand([prompts[i] for i in own]) for own in members.values()])
    shares = [0] * len(prompts)
    for own, of_tenant in zip(members.values(), of_tenants, strict=True):
        for i, share in zip(own, _serve(of_tenant, [prompts[i] for i in own]), strict=True):
            shares[i] = share
    return shares


def _demand(prompts: Sequence[Prompt]) -> int:
    """The most that a tenant's prompts can use: of those with the same next block one computes."""
    wanted: dict[bytes | int, int] = {}
    for i, prompt in enumerate(prompts):
        work = i if prompt.next_block is None else prompt.next_block
        wanted[work] = max(wanted.get(work, 0), prompt.num_wanted)
    return sum(wanted.values())


def _serve(budget: int, prompts: Sequence[Prompt]) -> list[int]:
    """The shares of one tenant's prompts."""
    shares = [0] * len(prompts)
    shares[0] = min(prompts[0].num_wanted, budget - budget // 2)
    left = budget - shares[0]
    in_work = {prompts[0].next_block}
    for i in sorted(range(len(prompts)), key=lambda i: (*prompts[i].urgency, i)):
        prompt = prompts[i]
        if i and prompt.next_block is not None:
            if prompt.next_block in in_work:
                continue
            in_work.add(prompt.next_block)
        more = min(prompt.num_wanted - shares[i], left)
        shares[i] += more
        left -= more
        if not left:
            break
    return shares


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

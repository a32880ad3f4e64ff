"""Shares of a bound: a tenant alone has all of it, a flood does not keep others out, twice the limit is the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.admission_queue import AdmissionQueue
from pagewire.errors import ResourceExhausted
from pagewire.tenant_shares import TenantShares
from pagewire.worker_view import TenantQueueSnapshot


def fill(shares: TenantShares, tenant: str) -> int:
    count = 0
    while shares.admits(tenant):
        shares.take(tenant)
        count += 1
    return count


def test_a_tenant_alone_has_all_of_it() -> None:
    shares = TenantShares(8)
    assert fill(shares, "A") == 8
    shares.give_back("A")
    assert fill(shares, "A") == 1


def test_a_flood_does_not_keep_others_out() -> None:
    shares = TenantShares(8)
    fill(shares, "A")
    assert fill(shares, "B") == 4
    assert fill(shares, "C") == 2
    shares.give_back("A")
    assert not shares.admits("A"), "it has more than its share"
    assert shares.by_tenant() == {"A": 7, "B": 4, "C": 2}


def test_a_share_is_at_least_one() -> None:
    shares = TenantShares(1)
    assert [fill(shares, tenant) for tenant in "ABC"] == [1, 1, 0]


@given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from("ABCDEFGH"), st.integers(1, 9)), max_size=200))
def test_twice_the_limit_is_the_end(limit: int, wishes: list[tuple[str, int]]) -> None:
    shares = TenantShares(limit)
    for tenant, amount in wishes:
        if shares.admits(tenant, amount):
            shares.take(tenant, amount)
    assert shares.total == sum(shares.by_tenant().values()) <= 2 * limit
    for tenant, held in shares.by_tenant().items():
        shares.give_back(tenant, held)
    assert shares.total == 0
    assert not shares.by_tenant()


def test_a_full_queue_refuses_the_flooder_and_takes_the_others() -> None:
    queue = AdmissionQueue(4, 100)
    for number in range(4):
        queue.enter(f"A{number}", 10, "A")
    with pytest.raises(ResourceExhausted, match="4 requests wait, max_queued_requests is 4; 4 are this tenant's"):
        queue.enter("A4", 10, "A")
    queue.enter("B0", 10, "B")
    queue.enter("B1", 10, "B")
    with pytest.raises(ResourceExhausted):
        queue.enter("B2", 10, "B")
    assert queue.by_tenant() == (TenantQueueSnapshot("A", 4, 40), TenantQueueSnapshot("B", 2, 20))
    for name in ("A0", "A1", "A2", "A3", "B0", "B1", "B1", "unknown"):
        queue.leave(name)
    assert len(queue) == queue.num_tokens == 0


def test_tokens_are_shared_likewise() -> None:
    queue = AdmissionQueue(10, 100)
    queue.enter("A0", 500, "A")  # nobody waits, else it could never run
    with pytest.raises(ResourceExhausted, match="max_queued_tokens is 100"):
        queue.enter("A1", 10, "A")
    with pytest.raises(ResourceExhausted, match="500 prompt tokens wait"):
        queue.enter("B0", 10, "B")  # far beyond twice the limit
    queue.leave("A0")
    queue.enter("A1", 100, "A")
    queue.enter("B0", 50, "B")
    with pytest.raises(ResourceExhausted):
        queue.enter("B1", 1, "B")


def test_what_is_expected_to_be_cached_is_not_to_compute() -> None:
    queue = AdmissionQueue(4, 100)
    for name, num_expected in (("part", 7), ("all", 10), ("more than it has", 99), ("nonsense", -5)):
        queue.enter(name, 10, num_expected_tokens=num_expected)
    assert (queue.num_tokens, queue.num_tokens_to_compute) == (40, 3 + 1 + 1 + 10)
    queue.leave("all")
    queue.leave("all")
    assert queue.num_tokens_to_compute == 3 + 1 + 10
    for name in ("part", "more than it has", "nonsense"):
        queue.leave(name)
    assert queue.num_tokens == queue.num_tokens_to_compute == 0

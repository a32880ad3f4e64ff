"""Tables told as changes are the tables; and what a step carries does not grow with its context."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.messages import Forward, decode, encode
from engine.parallel.tables import TablesReceiver, TablesSender
from kernels.paged import PagedBatch

BLOCK = 4


def batch(tables: list[list[int]], kv_lens: list[int], firsts: list[int] | None = None) -> PagedBatch:
    return PagedBatch.build([1] * len(tables), kv_lens, tables, BLOCK, firsts or ())


def assert_same(found: PagedBatch, wanted: PagedBatch) -> None:
    assert (found.cu_seqlens, found.kv_lens, found.block_size) == (wanted.cu_seqlens, wanted.kv_lens, wanted.block_size)
    for name in ("block_tables", "slot_blocks", "slot_offsets"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for one, other in zip(found.others, wanted.others, strict=True):
        assert_same(one, other)


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(0, 6), st.integers(1, BLOCK)), max_size=4
)


@given(steps=st.lists(ROWS, max_size=6))
@settings(max_examples=150)
def test_what_arrives_is_what_was_sent(steps: list[list[tuple[list[int], int, int]]]) -> None:
    """Whatever follows on what: rows that grow, begin with a repeated block, have the same blocks, come and go."""
    sender, receiver = TablesSender(), TablesReceiver()
    for rows in steps:
        tables = [table for table, _, _ in rows]
        kv_lens = [(len(table) - 1) * BLOCK + last for table, _, last in rows]
        sent = batch(tables, kv_lens, [min(first, len(table) - 1) for table, first, _ in rows])
        assert_same(receiver.batch(decode(encode(sender.changes(sent)))), sent)


def carried(sender: TablesSender, receiver: TablesReceiver, sent: PagedBatch) -> int:
    ids = torch.zeros(sent.num_tokens, dtype=torch.int64)
    data = encode(Forward.of(ids, ids, sender.changes(sent)))
    assert_same(receiver.batch(decode(data).changes), sent)
    return len(data)


def decode_steps(num_blocks: int) -> list[int]:
    """Bytes of the steps of three sequences with a common prefix, of which one leaves, another changes its place."""
    sender, receiver = TablesSender(), TablesReceiver()
    shared = list(range(num_blocks))
    tables = [[*shared, 10_000 + 1_000 * number] for number in range(3)]
    sizes = []
    for step in range(12):
        if step == 5:
            del tables[0]
        if step == 8:
            tables.reverse()
        for table in tables:
            table.append(table[-1] + 1)
        sizes.append(carried(sender, receiver, batch(tables, [len(table) * BLOCK for table in tables])))
    return sizes


def test_a_step_at_a_long_context_carries_what_is_new() -> None:
    short, long = decode_steps(8), decode_steps(8192)
    assert long[0] > 8192 * 4  # told once
    assert max(abs(one - other) for one, other in zip(short[1:], long[1:], strict=True)) <= 32  # larger numbers
    assert max(long[1:]) < 2000


def test_a_window_that_moves_on_carries_what_is_new() -> None:
    sender, receiver = TablesSender(), TablesReceiver()
    sizes = []
    for step in range(6):
        table, first = list(range(4096 + step)), 4000 + step
        whole = batch([table], [len(table) * BLOCK])
        window = batch([[7] * first + table[first:]], [len(table) * BLOCK], [first])
        sent = PagedBatch(
            whole.cu_seqlens, whole.kv_lens, whole.block_tables, whole.slot_blocks, whole.slot_offsets, BLOCK, (window,)
        )
        sizes.append(carried(sender, receiver, sent))
    assert max(sizes[1:]) < 2000 < sizes[0]

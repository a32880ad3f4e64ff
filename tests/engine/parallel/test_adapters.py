"""An adapter's parts do together what the whole one does, and lie on all ranks or on none."""

import pytest
import torch

from engine.lora.adapter import Adapter, LoraMatrices
from engine.lora.errors import AdapterLoadFailed
from engine.lora.slots import AdapterSlots
from engine.parallel.adapters import cut_adapter, put_together, whole_projections
from engine.parallel.messages import PutAdapter, decode, encode
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard
from engine.request import AdapterId
from engine.weight_source import Projection
from tests.engine.parallel.threads import ThreadRanks, on_ranks

HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB, RANK = 12, 4, 4, 20, 37, 3
SHAPES = {
    "embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN),
    "layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "layers.0.self_attn.k_proj": (2 * HEAD_DIM, HIDDEN),
    "layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "layers.0.mlp.up_proj": (FFN, HIDDEN), "layers.0.mlp.down_proj": (HIDDEN, FFN),
}  # fmt: skip
"""[num_out, num_in] of the whole model's."""


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size, 2, HEAD_DIM, VOCAB) for rank in range(size)]


def adapter(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for name, (num_out, num_in) in SHAPES.items():
        a = (num_out, RANK) if name == "embed_tokens" else (RANK, num_in)
        b = (RANK, num_in if name == "embed_tokens" else num_out)
        modules[name] = LoraMatrices(
            torch.randn(a, generator=generator).to(dtype), torch.randn(b, generator=generator).to(dtype)
        )
    return Adapter(bytes(32), RANK, modules)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_do_what_the_whole_does(size: int) -> None:
    """As they arrive: told to a rank and read there."""
    whole = adapter().modules
    parts = [decode(encode(PutAdapter.of(0, cut_adapter(adapter(), shard)))).adapter.modules for shard in shards(size)]
    for name in ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "lm_head"):
        assert torch.equal(torch.cat([part[name].b for part in parts], 1), whole[name].b)
        assert all(torch.equal(part[name].a, whole[name].a) for part in parts)
    for name in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
        assert torch.equal(torch.cat([part[name].a for part in parts], 1), whole[name].a)
        assert all(torch.equal(part[name].b, whole[name].b) for part in parts)
    assert torch.equal(torch.cat([part["embed_tokens"].a for part in parts]), whole["embed_tokens"].a)
    for shard, part in zip(shards(size), parts, strict=True):  # several ranks may have a kv head
        rows = [head * HEAD_DIM + i for head in shard.kv_heads for i in range(HEAD_DIM)]
        name = "layers.0.self_attn.k_proj"
        assert torch.equal(part[name].b, whole[name].b[:, rows])


def projections(shard: Shard) -> list[Projection]:
    """A rank's own."""
    found = []
    for name, (num_out, num_in) in SHAPES.items():
        rows, columns = shard.rows(name, num_out), shard.columns(name, num_in)
        found.append(Projection((name,), (len(rows),), len(columns)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_the_whole_shapes_are_known_from_a_part(size: int) -> None:
    for shard in shards(size):
        whole = whole_projections(projections(shard), shard)
        assert {each.names[0]: (each.num_outs[0], each.num_in) for each in whole} == SHAPES


def slots_of(shard: Shard) -> AdapterSlots:
    return AdapterSlots(projections(shard), torch.bfloat16, max_loras=2, max_rank=RANK)


def test_an_adapter_that_one_rank_has_no_room_for_is_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {shard.rank: slots_of(shard) for shard in shards(2)}
    write = AdapterSlots._write

    def fail(slots: AdapterSlots, slot: int, *rest: object) -> None:
        write(slots, slot, *rest)  # type: ignore[arg-type]
        if slots is found[1]:
            raise MemoryError("no room")

    def put(which: Adapter, slot: int) -> list[Exception | None]:
        def work(rank: int, group: ThreadRanks) -> Exception | None:
            shard = shards(2)[rank]
            return put_together(found[rank], slot, cut_adapter(which, shard), shard, group)

        return on_ranks(2, work)

    assert put(adapter(0), 0) == [None, None]
    monkeypatch.setattr(AdapterSlots, "_write", fail)
    here, there = put(adapter(1), 1)
    assert str(here) == "1 of 2 ranks have no room for their part"
    assert str(there) == "no room"
    for slots in found.values():
        assert slots.step([1]) is not None
        assert slots.step([1]).of(("lm_head",)) is None  # type: ignore[union-attr]
        assert slots.step([0]).of(("lm_head",)) is not None  # type: ignore[union-attr]


def test_what_another_rank_has_no_room_for_fails_its_own_requests() -> None:
    class Others:
        def put(self, slot: int, adapter: Adapter) -> None:
            raise MemoryError("1 of 2 ranks have no room for their part")

    slots = slots_of(shards(2)[0])
    slots.others = Others()
    known = AdapterId("tuned", bytes(32), 1, adapter())
    with pytest.raises(
        AdapterLoadFailed, match="adapter 'tuned' can't be put on the device: MemoryError: 1 of 2 ranks"
    ):
        slots.assign([known])


def test_no_rank_is_told_of_an_adapter_whose_other_parts_cannot_be_made() -> None:
    """It would wait for the others in the middle of their next step."""

    class Connection:
        def send_bytes(self, data: bytes) -> None:
            told.append(decode(data))

    def message(rank: int) -> str:
        if rank == 2:
            raise MemoryError("no room")
        return f"for {rank}"

    told: list[str] = []
    ranks = Ranks.__new__(Ranks)
    ranks._death = None
    ranks._connections = {1: Connection(), 2: Connection()}  # type: ignore[dict-item]
    with pytest.raises(MemoryError):
        ranks.tell_each(message)
    assert told == []
    ranks.tell_each(lambda rank: f"for {rank}")
    assert told == ["for 1", "for 2"]

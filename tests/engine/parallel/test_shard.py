"""What each rank has, put together again, is the whole model; and what can't be shared evenly is refused by number."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.shard import Shard, check_divisible

HEAD_DIM = 4


def shards(size: int, num_kv_heads: int, vocab_size: int = 300) -> list[Shard]:
    return [Shard(rank, size, num_kv_heads, HEAD_DIM, vocab_size) for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "whole", "dim"),
    [
        ("layers.0.self_attn.q_proj.weight", (32, 12), 0),
        ("layers.0.self_attn.q_proj.bias", (32,), 0),
        ("layers.0.self_attn.q_b_proj.weight", (32, 12), 0),
        ("layers.0.self_attn.kv_b_proj.weight", (32, 12), 0),
        ("layers.0.self_attn.k_proj.weight", (16, 12), 0),
        ("layers.0.self_attn.v_proj.bias", (16,), 0),
        ("layers.0.self_attn.o_proj.weight", (12, 32), 1),
        ("layers.0.mlp.gate_proj.weight", (20, 12), 0),
        ("layers.0.mlp.down_proj.weight", (12, 20), 1),
        ("layers.0.mlp.experts.3.up_proj.weight", (20, 12), 0),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_the_whole(name: str, whole: tuple[int, ...], dim: int, size: int) -> None:
    stored = torch.arange(float(torch.Size(whole).numel())).view(whole)
    shape = tuple(length // size if at == dim else length for at, length in enumerate(whole))
    cuts = [shard.cut(name, shape) for shard in shards(size, num_kv_heads=4)]
    assert {cut.whole for cut in cuts} == {whole}
    parts = [cut.of(stored) for cut in cuts]
    assert all(part.shape == shape and part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, dim), stored)


@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.self_attn.q_a_proj.bias",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.down_proj.bias",
    ],
)
def test_some_are_everybodys(name: str) -> None:
    stored = torch.rand(8)
    for shard in shards(2, num_kv_heads=2):
        assert shard.cut(name, (8,)).of(stored) is stored


def test_more_ranks_than_kv_heads_have_the_same_ones() -> None:
    assert [list(shard.kv_heads) for shard in shards(4, num_kv_heads=2)] == [[0], [0], [1], [1]]
    stored = torch.arange(2.0 * HEAD_DIM)
    parts = [shard.cut("k_proj.bias", (HEAD_DIM,)).of(stored).tolist() for shard in shards(4, num_kv_heads=2)]
    assert parts == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 2), (4, 2)])
def test_fused_tensors_are_cut_in_each_of_their_parts(size: int, num_kv_heads: int) -> None:
    q, k, v = (torch.rand(rows * HEAD_DIM, 3) for rows in (8, num_kv_heads, num_kv_heads))
    gate, up = torch.rand(12, 3), torch.rand(12, 3)
    for shard in shards(size, num_kv_heads):
        rows = 8 * HEAD_DIM // size
        kv = len(shard.kv_heads) * HEAD_DIM
        first = shard.kv_heads.start * HEAD_DIM
        found = shard.cut("self_attn.qkv_proj.weight", (rows + 2 * kv, 3)).of(torch.cat((q, k, v)))
        own = slice(first, first + kv)
        assert torch.equal(found, torch.cat((q[rows * shard.rank :][:rows], k[own], v[own])))
        found = shard.cut("mlp.gate_up_proj.weight", (24 // size, 3)).of(torch.cat((gate, up)))
        each = 12 // size
        assert torch.equal(found, torch.cat((gate[each * shard.rank :][:each], up[each * shard.rank :][:each])))


@given(size=st.integers(1, 16), vocab_size=st.integers(1, 400))
def test_every_token_id_is_one_ranks(size: int, vocab_size: int) -> None:
    ranges = [shard.vocabulary for shard in shards(size, 1, vocab_size)]
    assert [token_id for part in ranges for token_id in part] == list(range(vocab_size))
    assert max(map(len, ranges)) <= shards(size, 1, vocab_size)[0].most_token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6}, "6 attention heads can't be shared evenly by 4 ranks"),
        ({"num_kv_heads": 3}, "3 kv heads can't be shared evenly by 4 ranks"),
        ({"intermediate_size": 30}, "intermediate_size = 30 can't be shared evenly by 4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(change: dict[str, int], message: str) -> None:
    sizes = {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 32}
    check_divisible(4, **sizes)
    check_divisible(4, **sizes | {"num_kv_heads": 2})
    with pytest.raises(ValueError, match=message):
        check_divisible(4, **sizes | change)


def test_files_of_ranks_have_names_of_their_own() -> None:
    one, other = shards(2, 2)
    assert len({one.label, other.label, replace(one, size=4).label}) == 3

"""Block keys: golden vectors, no field confused with another, the same in every process."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.hashing import adapter_key, block_keys, canonical_json, index_key, root_key

GOLDEN = Path(__file__).parents[2] / "protos/pagewire/v1/block_keys.json"
ROOT = bytes(range(32))
ROOT_FIELDS: dict[str, Any] = {
    "weights_digest": b"w" * 32,
    "kv_config": {"rope_theta": 10000.0, "num_layers": 2},
    "compute_dtype": "float32",
    "kv_dtype": "float32",
    "quantization": "none",
    "block_size": 4,
    "group_layout": "full:0-1",
    "kv_version": 1,
}


def _golden() -> Any:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", _golden()["roots"], ids=lambda case: case["name"])
def test_root_golden_vectors(case: dict[str, Any]) -> None:
    fields = {**case["fields"], "weights_digest": bytes.fromhex(case["fields"]["weights_digest"])}
    assert canonical_json(fields["kv_config"]).decode() == case["canonical_config"]
    assert root_key(**fields).hex() == case["root"]


@pytest.mark.parametrize("case", _golden()["blocks"], ids=lambda case: case["name"])
def test_block_golden_vectors(case: dict[str, Any]) -> None:
    keys = block_keys(
        bytes.fromhex(case["root"]),
        case["token_ids"],
        case["block_size"],
        cache_salt=case["cache_salt"],
        adapter=bytes.fromhex(case["adapter_digest"]),
        parent=bytes.fromhex(case["parent"]) if case["parent"] else None,
    )
    assert [key.hex() for key in keys] == case["keys"]


@pytest.mark.parametrize("case", _golden()["adapters"], ids=lambda case: case["name"])
def test_adapter_golden_vectors(case: dict[str, Any]) -> None:
    assert adapter_key(bytes.fromhex(case["digest"]), case["generation"]).hex() == case["key"]


def test_layout_written_out_by_hand() -> None:
    def tlv(tag: int, value: bytes) -> bytes:
        return bytes([tag]) + len(value).to_bytes(4, "little") + value

    first = hashlib.sha256(
        tlv(0x01, b"pw-blk-1")
        + tlv(0x10, ROOT)
        + tlv(0x11, "Salz€".encode())
        + tlv(0x12, b"")
        + tlv(0x14, struct.pack("<2I", 7, 2**32 - 1))
    ).digest()
    second = hashlib.sha256(tlv(0x01, b"pw-blk-1") + tlv(0x10, first) + tlv(0x14, struct.pack("<2I", 0, 1))).digest()
    assert block_keys(ROOT, [7, 2**32 - 1, 0, 1, 5], 2, cache_salt="Salz€") == [first, second]


def test_salt_and_adapter_of_the_same_name_differ() -> None:
    """CASES D1."""
    salt = block_keys(ROOT, range(4), 4, cache_salt="X")
    adapter = block_keys(ROOT, range(4), 4, adapter=b"X")
    neither = block_keys(ROOT, range(4), 4)
    assert len({salt[0], adapter[0], neither[0]}) == 3


def test_bytes_cannot_move_between_fields() -> None:
    assert block_keys(ROOT, [1], 1, cache_salt="ab", adapter=b"c") != block_keys(
        ROOT, [1], 1, cache_salt="a", adapter=b"bc"
    )
    assert root_key(**{**ROOT_FIELDS, "compute_dtype": "float32f", "kv_dtype": "loat32"}) != root_key(**ROOT_FIELDS)


def test_salt_separates_the_whole_chain() -> None:
    plain, salted = block_keys(ROOT, range(12), 4), block_keys(ROOT, range(12), 4, cache_salt="t")
    assert not set(plain) & set(salted)


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(ROOT, range(n), 4)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_parent_continues_a_chain() -> None:
    keys = block_keys(ROOT, range(20), 4, cache_salt="s")
    assert block_keys(ROOT, range(8, 20), 4, cache_salt="ignored", parent=keys[1]) == keys[2:]


def test_d8_keys_are_of_tokens_not_of_text() -> None:
    """CASES D8: a text tokenized in two parts may have other tokens at the seam: blocks before it are shared, from it
    on they aren't; the same tokens from any split are the same blocks."""
    vocabulary = {"ab": 0, "c": 1, "a": 2, "bc": 3}
    whole = [vocabulary[each] for each in ("ab", "c") * 4]
    at_seam = [*whole[:4], *(vocabulary[each] for each in ("a", "bc")), *whole[6:]]
    assert "".join(k for t in whole for k, v in vocabulary.items() if v == t) == "abc" * 4
    assert "".join(k for t in at_seam for k, v in vocabulary.items() if v == t) == "abc" * 4
    keys, others = block_keys(ROOT, whole, 2), block_keys(ROOT, at_seam, 2)
    assert [mine == other for mine, other in zip(keys, others, strict=True)] == [True, True, False, False]
    assert block_keys(ROOT, whole[:2], 2) + block_keys(ROOT, whole[2:], 2, parent=keys[0]) == keys


def test_a_key_depends_on_all_tokens_before() -> None:
    keys, other = block_keys(ROOT, range(12), 4), block_keys(ROOT, [9, *range(1, 12)], 4)
    assert not set(keys) & set(other)


@pytest.mark.parametrize("field", sorted(ROOT_FIELDS))
def test_every_field_changes_the_root(field: str) -> None:
    value = ROOT_FIELDS[field]
    changed = {"x": 1} if isinstance(value, dict) else value + type(value)(b"x" if isinstance(value, bytes) else "1")
    assert root_key(**{**ROOT_FIELDS, field: changed}) != root_key(**ROOT_FIELDS)


def test_order_of_the_config_does_not_matter() -> None:
    assert canonical_json({"b": 1e-06, "a": [1.5, None, True, "ü"]}) == b'{"a":[1.5,null,true,"\\u00fc"],"b":1e-06}'
    reordered = dict(reversed(ROOT_FIELDS["kv_config"].items()))
    assert root_key(**{**ROOT_FIELDS, "kv_config": reordered}) == root_key(**ROOT_FIELDS)


@pytest.mark.parametrize(
    ("token", "error"), [(-1, OverflowError), (2**32, OverflowError), ("a", TypeError), (1.5, TypeError)]
)
def test_tokens_that_are_no_u32_are_refused(token: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        block_keys(ROOT, [token], 1)


def test_nan_in_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"scale": float("nan")})


def test_index_key_is_the_first_half() -> None:
    assert index_key(ROOT) == ROOT[:16]


def test_two_processes_agree() -> None:
    """CASES D6: no process-dependent hash takes part."""
    script = (
        "from kvstore.hashing import block_keys, root_key\n"
        "root = root_key(weights_digest=b'w', kv_config={'b': 2.5, 'a': None}, compute_dtype='float32',"
        " kv_dtype='float32', quantization='', block_size=4, group_layout='g', kv_version=1)\n"
        "print([key.hex() for key in block_keys(root, range(40), 4, cache_salt='s')])"
    )
    outputs = set()
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=GOLDEN.parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1

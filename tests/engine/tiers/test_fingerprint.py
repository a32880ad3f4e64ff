"""What blocks depend on is in their fingerprint, and nothing else."""

import pytest

from engine.tiers.disk_format import fingerprint

NATIVE, TORCH, FOREIGN = "float32/native/avx2/tp1", "float32/torch/any/tp1", "float32/transformers-4.57+native/avx2/tp1"


def test_every_part_counts() -> None:
    parts = (b"r" * 32, "layout", TORCH, "2.9.1")
    others = (b"o" * 32, "tuoyal", FOREIGN, "2.9.2")
    changed = {fingerprint(*(*parts[:i], others[i], *parts[i + 1 :])) for i in range(4)}
    assert len(changed | {fingerprint(*parts)}) == 5


@pytest.mark.parametrize(("numerics_class", "counts"), [(NATIVE, False), (TORCH, True), (FOREIGN, True)])
def test_torch_counts_where_it_computes(numerics_class: str, counts: bool) -> None:
    old, new = (fingerprint(b"r" * 32, "layout", numerics_class, version) for version in ("2.9.1", "2.9.2"))
    assert (old != new) is counts

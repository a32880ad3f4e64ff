"""Which machine each rank is on, who can map rank 0's pool, and what follows from it. Pure.

Rank 0's own machine has the name "".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.errors import ModelError
from engine.memory import KvLayout
from engine.parallel.messages import Loaded
from engine.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Machines:
    """Of ranks 1 … n. Those on rank 0's share the pool's memory with it; the others have pools of their own heads.

    With `device_pools` all have pools of their own: each on its own device, whose memory nobody else maps.
    """

    names: Mapping[int, str]
    device_pools: bool = False

    @property
    def num_here(self) -> int:
        """Ranks on rank 0's machine, with rank 0."""
        return 1 + sum(not name for name in self.names.values())

    @property
    def elsewhere(self) -> list[int]:
        """The ranks on other machines."""
        return [rank for rank, name in sorted(self.names.items()) if name]

    @property
    def with_own_pools(self) -> list[int]:
        """The ranks that can't map rank 0's."""
        return sorted(self.names) if self.device_pools else self.elsewhere

    def num_sharing(self, rank: int) -> int:
        """How many ranks there are on its machine."""
        return sum(name == self.names[rank] for name in self.names.values()) if self.names[rank] else self.num_here

    def heads_elsewhere(self, shard: Shard) -> dict[int, range]:
        """The kv heads of the ranks with pools of their own; `shard`: any rank's."""
        return {rank: replace(shard, rank=rank).kv_heads for rank in self.with_own_pools}

    def tellers(self, shard: Shard) -> dict[int, range]:
        """Of these the ranks whose heads nobody else stores into rank 0's pool: several may have the same ones."""
        here = [0, *(self.names.keys() - self.with_own_pools)]
        stored = {replace(shard, rank=rank).kv_heads for rank in here}
        found = {}
        for rank, heads in self.heads_elsewhere(shard).items():
            if heads not in stored:
                found[rank] = heads
                stored.add(heads)
        return found

    def pool_bytes(self, here: int, layout: KvLayout, loaded: Mapping[int, Loaded]) -> int:
        """What a pool of whole blocks may take: `here`, or what is free elsewhere, where each rank has some heads."""
        heads = max(1, layout.num_kv_heads // (len(self.names) + 1))
        free = [
            loaded[rank].free_bytes // self.num_sharing(rank) * layout.num_kv_heads // heads
            for rank in self.with_own_pools
        ]
        return min([here, *free])

    def check_weights(self, loaded: Mapping[int, Loaded], digest: bytes, model: str) -> None:
        """Raises ModelError if a rank has read others than those of `digest`."""
        for rank, each in sorted(loaded.items()):
            if (found := each.weights_digest) != digest:
                name = self.names[rank]
                why = f"of {name} are others" if name else "were changed while they were loaded"
                raise ModelError(
                    f"{model}: rank {rank} has read other weights (SHA-256 {found.hex()[:16]}…) "
                    f"than rank 0 ({digest.hex()[:16]}…): the files {why}"
                )

    def check_classes(self, loaded: Mapping[int, Loaded], numerics_class: str) -> None:
        """Raises ModelError if a rank would compute in another than rank 0's."""
        for rank, each in sorted(loaded.items()):
            if each.numerics_class != numerics_class:
                where = self.names[rank] and f" on {self.names[rank]}"
                raise ModelError(
                    f"rank {rank}{where} would compute as {each.numerics_class}, rank 0 as "
                    f"{numerics_class}: machines that share a model need processors that the kernels take for the same"
                )

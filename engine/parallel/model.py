"""The model on several ranks, as rank 0's runner sees it: each call is told to the others, then all compute it."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from engine.errors import EngineDied
from engine.kernel_set import ModelKernels
from engine.lora.slots import AdapterSlots
from engine.lora.step import LoraStep
from engine.memory import KvMemory
from engine.models.decoder import Decoder
from engine.parallel.adapters import SharedSlots
from engine.parallel.group import RankGroup
from engine.parallel.heads import KvHeads
from engine.parallel.messages import Forward, Logits
from engine.parallel.remote_kv import RemoteKv
from engine.parallel.tables import TablesSender
from engine.parallel.vocabulary import gather_logits
from engine.runner import Place, as_it_is
from engine.weight_source import Projection
from kernels.paged import PagedBatch

R = TypeVar("R")


class OtherRanks(Protocol):
    """The ranks but this one."""

    def tell(self, message: object) -> None:
        """Sends it to each. Raises EngineDied if one has ended."""
        ...

    def tell_each(self, message: Callable[[int], object]) -> None:
        """The same with a message for each rank."""
        ...

    def lost(self, error: Exception) -> EngineDied:
        """Why a computation with them has failed with `error`."""
        ...


class ParallelModel:
    """A `Model` whose part on rank 0 is `own`. After an exception the ranks are no longer in step: EngineDied."""

    def __init__(
        self,
        own: Decoder,
        heads: KvHeads,
        vocab_size: int,
        group: RankGroup,
        others: OtherRanks,
        remote: RemoteKv | None = None,
        place: Place = as_it_is,
    ) -> None:
        """`remote`: of the ranks with pools of their own, if there are some; `place`: for rank 0's kernels."""
        if own.config.shard is None:
            raise ValueError("a model that is not shared out needs no other ranks")
        own.group = group
        self._own = own
        self._shard = own.config.shard
        self._tables = TablesSender()
        self._heads = heads
        self._vocab_size = vocab_size
        self._width = self._shard.most_token_ids
        self._group = group
        self._others = others
        self._remote = remote
        self._place = place

    @property
    def kernels(self) -> ModelKernels:
        return self._own.kernels

    @property
    def numerics_class(self) -> str:
        return self._own.numerics_class

    @property
    def num_bytes_read(self) -> int:
        """By each rank."""
        return self._own.num_bytes_read

    @property
    def adaptable(self) -> tuple[Projection, ...]:
        """Of rank 0's part."""
        return self._own.adaptable

    def share(self, slots: AdapterSlots) -> None:
        """What is put into these slots, rank 0's, is from now on put on the other ranks too."""
        slots.others = SharedSlots(slots, self._shard, self._group, self._others)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        memory: KvMemory,
        adapters: LoraStep | None = None,
    ) -> Tensor:
        """As the model's; `memory` is what all ranks have in common, of which each sees its heads."""
        if self._remote is not None:
            self._remote.bring(batch)

        def compute() -> Tensor:
            self._others.tell(Forward.of(input_ids, positions, self._tables.changes(batch), adapters))
            hidden = self._own.forward(input_ids, positions, self._place(batch), self._heads, adapters)
            if self._remote is not None:
                self._remote.collect(batch)
            return hidden

        return self._together(compute)

    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor:
        """As the model's."""
        self._others.tell(Logits.of(hidden, adapters))

        def compute() -> Tensor:
            whole = gather_logits(self._own.logits(hidden, adapters), self._width, self._vocab_size, self._group)
            if whole is None:
                raise ValueError("rank 0 gathers the logits")
            return whole

        return self._together(compute)

    def _together(self, compute: Callable[[], R]) -> R:
        try:
            return compute()
        except EngineDied:
            raise
        except Exception as error:
            raise self._others.lost(error) from error

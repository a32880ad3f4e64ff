"""Any other causal model: Hugging Face's own module, its attention over our paged cache, its linears on our kernels.

torch picks a kernel by the shape, and a vectorized op treats the end of a tensor otherwise than its middle, so a
module's row would depend on the number of rows. Here the module only ever sees one shape, TILE_ROWS tokens (the last
tile is padded), on one of torch's threads; within one shape a row depends neither on its place nor on its neighbours
(decision 0003). Tiles are computed one after another, so a token finds all that comes before it in the cache. Linear
layers, most of the work, are the kernel set's, row-invariant at any shape and on all threads.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.kernel_set import ModelKernels, numerics_class
from engine.lora.step import LoraStep
from engine.memory import KvMemory
from engine.transformers_config import TransformersConfig
from engine.weight_source import Projection
from kernels import reference
from kernels.paged import PagedBatch
from kernels.tile_pool import single_threaded

ATTENTION = "pagewire"
TILE_ROWS = 16
EVEN_WIDTH = 4
"""Of 16 rows of such a width nothing is left after torch's vectorized loops (two AVX-512 registers of bfloat16)."""
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_router_logits", "output_hidden_states"}
)


class NotServable(ValueError):
    """The module does something that the paged cache has no answer for."""


@dataclass(slots=True)
class PagedStep:
    """What the attention of one tile needs; `seen` are the layers whose attention has run."""

    config: TransformersConfig
    kernels: ModelKernels
    batch: PagedBatch | None = None
    memory: KvMemory | None = None
    plans: dict[tuple[int, int | None], Any] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)


class TransformersModel:
    """A module of transformers as the engine runs a model; `varying`: a row's last bits may depend on others."""

    adaptable: tuple[Projection, ...] = ()

    def __init__(self, config: TransformersConfig, kernels: ModelKernels, module: Any) -> None:
        """`module`: the causal model, in evaluation mode, with ATTENTION as its attention. Its linears are replaced."""
        self.config = config
        self.kernels = kernels
        self.module = module
        self._step = PagedStep(config, kernels)
        for each in module.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.paged_step = self._step
        self.num_bytes_read = sum(each.numel() * each.element_size() for each in module.parameters())
        """Bytes of weights that a forward of one token reads, at most."""
        replace_linears(module, kernels)
        head = module.get_output_embeddings()
        self.varying = any(
            isinstance(each, PackedLinear) and each is not head and each.out_features % EVEN_WIDTH
            for each in module.modules()
        )
        self._base = module.base_model
        # The causal model's own way from hidden states to logits, with their scaling, cap and whatever it has.
        self._head = copy.copy(module)
        self._head._modules = {**module._modules, module.base_model_prefix: _Given()}

    @property
    def numerics_class(self) -> str:
        """Within one class logits are bitwise equal on every path, unless it says that they vary."""
        implementation = f"transformers-{transformers.__version__}{'-varying' if self.varying else ''}"
        return numerics_class(self.kernels, self.config.dtype, implementation=implementation)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        memory: KvMemory,
        adapters: LoraStep | None = None,
    ) -> Tensor:
        """Compute the batch's tokens and store their keys and values. input_ids, positions [T] -> [T, hidden]."""
        hidden = []
        with single_threaded():
            for rows, tile in tiles(batch):
                self._begin(tile, memory)
                output = self._base(
                    input_ids=_padded(input_ids[rows])[None],
                    position_ids=_padded(positions[rows])[None],
                    use_cache=False,
                )
                self._check_layers()
                hidden.append(output.last_hidden_state[0, : tile.num_tokens])
        return torch.cat(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor:
        """float32 logits of rows of `forward`'s result. [R, hidden] -> [R, vocab]."""
        ids = torch.zeros(1, TILE_ROWS, dtype=torch.int64)
        found = []
        with single_threaded():
            for rows in torch.split(hidden, TILE_ROWS):
                self._head._modules[self.module.base_model_prefix].hidden = _padded(rows)[None]
                found.append(self._head(input_ids=ids, use_cache=False).logits[0, : rows.shape[0]].float())
        return torch.cat(found)

    def _begin(self, tile: PagedBatch, memory: KvMemory) -> None:
        step, config = self._step, self.config
        step.batch, step.memory, step.seen = tile, memory, []
        step.plans = {
            (group, window): self.kernels.plan_attention(
                tile.of_group(group), group_size=config.group_size, window=window
            )
            for group, window in dict.fromkeys(zip(memory.layer_groups, config.layer_windows, strict=True))
        }

    def _check_layers(self) -> None:
        if self._step.seen != list(range(self.config.num_layers)):
            missing = sorted(set(range(self.config.num_layers)) - set(self._step.seen))
            raise NotServable(
                f"of its {self.config.num_layers} layers {self._step.seen} attended through transformers' attention "
                f"interface; {missing or 'one more than once'} did not (state space, linear or an attention of its own)"
            )


class _Given(nn.Module):
    """In the base model's place: its result, given."""

    hidden: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> "_GivenOutput":
        return _GivenOutput(self.hidden)

    @property
    def decoder(self) -> "_Given":
        """Where models that once had an encoder keep their layers (OPT)."""
        return self


class _GivenOutput(tuple[Tensor]):
    """Hidden states under the names that a head asks for; nothing else of a base model's output is there."""

    def __new__(cls, hidden: Tensor) -> "_GivenOutput":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


class PackedLinear(nn.Module):
    """A linear layer on the kernel set: y = x Wᵀ + b for any number of rows. [..., K] -> [..., N]."""

    def __init__(self, kernels: ModelKernels, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._kernels = kernels
        self.out_features, self.in_features = weight.shape
        self._packed = kernels.pack(weight, biases=() if bias is None else (bias,))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._kernels.linear(rows, self._packed).view(*x.shape[:-1], self.out_features)


def replace_linears(module: Any, kernels: ModelKernels) -> None:
    """Each plain linear layer (and GPT-2's Conv1D) becomes a PackedLinear; its own weight is let go."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight.detach()
            elif type(child) is Conv1D:
                weight = child.weight.detach().t().contiguous()
            else:
                continue
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, PackedLinear(kernels, weight, bias))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: store the tile's keys and values, attend over the cache.

    query [1, Hq, TILE_ROWS, D], key and value [1, Hkv, TILE_ROWS, D] -> [1, TILE_ROWS, Hq, D]; rows of padding get 0.
    Raises NotServable.
    """
    step: PagedStep = module.paged_step
    layer, config = module.layer_idx, step.config
    window = config.layer_windows[layer]
    _check_call(module, attention_mask, sliding_window, window, is_causal, others)
    shape = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.head_dim)
    if (query.shape[1], key.shape[1], value.shape[1], key.shape[3]) != shape or value.shape[3] != config.head_dim:
        raise NotServable(
            f"layer {layer} has queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}; "
            f"config.json says {config.num_heads} heads, {config.num_kv_heads} kv heads of size {config.head_dim}"
        )
    assert step.batch is not None
    assert step.memory is not None
    num_rows = step.batch.num_tokens
    q, k, v = (each[0, :, :num_rows].transpose(0, 1).to(config.dtype) for each in (query, key, value))
    k_cache, v_cache = step.memory.layer(layer)
    group = step.memory.layer_groups[layer]
    reference.write_kv(k, v, k_cache, v_cache, step.batch.of_group(group))
    scale = config.head_dim**-0.5 if scaling is None else scaling
    attended = step.kernels.paged_attention(
        q.contiguous(), k_cache, v_cache, step.plans[group, window], scale=scale, cap=softcap
    )
    out = query.new_zeros(1, query.shape[2], config.num_heads, config.head_dim)
    out[0, :num_rows] = attended
    step.seen.append(layer)
    return out, None


def _check_call(
    module: Any,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    window: int | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    where = f"layer {module.layer_idx}"
    if attention_mask is not None:
        raise NotServable(f"{where} brings an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotServable(f"{where} is not causal")
    if sliding_window is not None and sliding_window != window:
        raise NotServable(f"{where} has a window of {sliding_window} tokens; config.json says {window}")
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise NotServable(f"{where} asks its attention for {name}, which is not supported")


def tiles(batch: PagedBatch) -> Iterator[tuple[slice, PagedBatch]]:
    """The batch in pieces of at most TILE_ROWS tokens, in order: their rows, and each as a batch of its own."""
    for begin in range(0, batch.num_tokens, TILE_ROWS):
        end = min(begin + TILE_ROWS, batch.num_tokens)
        sequences, cu_seqlens, kv_lens = [], [0], []
        for sequence, kv_len in enumerate(batch.kv_lens):
            first, last = batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]
            if first < end and last > begin:
                sequences.append(sequence)
                cu_seqlens.append(min(last, end) - begin)
                kv_lens.append(kv_len - max(0, last - end))
        whole, *others = (
            PagedBatch(
                cu_seqlens=tuple(cu_seqlens),
                kv_lens=tuple(kv_lens),
                block_tables=group.block_tables[sequences],
                slot_blocks=group.slot_blocks[begin:end],
                slot_offsets=group.slot_offsets[begin:end],
                block_size=group.block_size,
            )
            for group in (batch, *batch.others)
        )
        yield slice(begin, end), replace(whole, others=tuple(others))


def _padded(rows: Tensor) -> Tensor:
    """With rows of zeros up to TILE_ROWS."""
    padding = rows.new_zeros(TILE_ROWS - rows.shape[0], *rows.shape[1:])
    return torch.cat((rows, padding)) if len(padding) else rows

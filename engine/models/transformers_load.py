"""Loads a model for Hugging Face's own module, and proves it before it serves.

At start a few made-up tokens are computed twice: by the module as transformers runs it, and through the paged cache in
chunks beside another sequence. What differs (an attention that doesn't go through the interface, position biases in a
mask, state) is refused. If the result is right but not the same bits in another company, the numerics class says so.
"""

import logging
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.errors import ModelError
from engine.kernel_set import ModelKernels
from engine.memory import KvLayout, KvMemory
from engine.models.transformers_model import ATTENTION, NotServable, TransformersModel, attend
from engine.transformers_config import TransformersConfig
from kernels.paged import PagedBatch

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the logits' norm. What is left out of an attention changes more; random bfloat16 models differ by up to 0.05."""
_BLOCK_SIZE, _NUM_BLOCKS = 4, 32


def load_transformers_model(config: TransformersConfig, kernels: ModelKernels) -> TransformersModel:
    """Raises ModelError, naming what is not supported."""
    if kernels.quantization is not None:
        raise ModelError(f"quantization = {kernels.quantization} is not supported with model_impl = transformers")
    check_available()
    module = _load_module(config)
    try:
        expected = _own_logits(config, module)  # before its linears are replaced
        model = TransformersModel(config, kernels, module)
        _prove(model, expected)
    except NotServable as error:
        raise ModelError(f"{config.path}: model_impl = transformers: {config.architecture}: {error}") from error
    except Exception as error:  # whatever its code does with the layers in its linears' place
        raise ModelError(
            f"{config.path}: model_impl = transformers: {config.architecture} does not run here: "
            f"{type(error).__name__}: {error}"
        ) from error
    if model.varying:
        logger.warning(
            "%s: logits depend on what else is in the batch, in their last bits; numerics class %s",
            config.architecture,
            model.numerics_class,
        )
    return model


def check_available() -> None:
    """Raise ModelError when transformers would take pagewire's package `kernels` for Hugging Face's."""
    from transformers.utils.import_utils import is_kernels_available

    if is_kernels_available():
        raise ModelError(
            "model_impl = transformers is not available: Hugging Face's distribution `kernels` is installed, and its "
            "models would import it and get pagewire's package of that name. Remove it (`pip uninstall kernels`)"
        )


def _load_module(config: TransformersConfig) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    if (adapter := config.path / "adapter_config.json").exists():  # transformers would load it by itself
        raise ModelError(f"{adapter}: model_impl = transformers serves no adapters")
    AttentionInterface.register(ATTENTION, attend)
    # Experts as products of a fixed shape for each token: the other ways pick their kernels by how many rows they have.
    cls: Any = getattr(transformers, config.architecture)
    experts = {"experts_implementation": "batched_mm"} if cls._can_set_experts_implementation() else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(config.path),
            dtype=config.dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **experts,
        )
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"{config.path}: model_impl = transformers: {str(error).strip().splitlines()[0]}") from error
    module, found = loaded
    # Not refused by transformers, which makes up weights, or leaves some out.
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, found.get(problem) or ())):
            what = problem.replace("_", " ").removesuffix(" keys")
            raise ModelError(
                f"{config.path}: {len(names)} {what} tensors for {config.architecture}: {', '.join(names[:3])}"
            )
    module.train(False)
    return module


def _prompt(config: TransformersConfig, seed: int) -> Tensor:
    return torch.randint(
        0, config.vocab_size, (min(21, config.max_position),), generator=torch.Generator().manual_seed(seed)
    )


@torch.inference_mode()
def _own_logits(config: TransformersConfig, module: Any) -> Tensor:
    """Of the first prompt, as transformers computes them."""
    module.set_attn_implementation("eager")
    logits: Tensor = module(input_ids=_prompt(config, 1)[None], use_cache=False).logits[0].float()
    module.set_attn_implementation(ATTENTION)
    return logits


@torch.inference_mode()
def _prove(model: TransformersModel, expected: Tensor) -> None:
    """Raises NotServable; sets `varying`."""
    config = model.config
    first, second = (_prompt(config, seed) for seed in (1, 2))
    length = len(first)
    layout = KvLayout.of(config, _BLOCK_SIZE)
    memory = KvMemory(layout, _NUM_BLOCKS)
    blocks = list(range(_NUM_BLOCKS))
    alone = _logits(model, memory, [(first, 0, blocks[:8])])
    half = length // 2
    _logits(model, memory, [(second[: length - 2], 0, blocks[8:16]), (first[:half], 0, blocks[16:24])])
    rest = _logits(model, memory, [(second[-2:], length - 2, blocks[8:16]), (first[half:], half, blocks[16:24])])
    memory.close()
    tolerance = _TOLERANCE[config.dtype]
    # In bfloat16 a mixture of experts may send a row elsewhere, for a rounding.
    share = 0.5 if model.module._can_set_experts_implementation() else 0.9
    for found, wanted in ((alone, expected), (rest[2:], expected[half:])):
        error = float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(share))
        if not error <= tolerance:
            raise NotServable(
                f"through the paged cache its logits are {error:.2g} of their norm away from transformers' own, more "
                f"than {tolerance}: its attention does something that the interface does not tell"
            )
    model.varying |= not torch.equal(rest[2:], alone[half:])


def _logits(model: TransformersModel, memory: KvMemory, work: list[tuple[Tensor, int, list[int]]]) -> Tensor:
    """Compute (tokens, position of the first, block table) in one batch; the logits of all."""
    query_lens = [len(tokens) for tokens, _, _ in work]
    kv_lens = [start + len(tokens) for tokens, start, _ in work]
    batch = PagedBatch.build(query_lens, kv_lens, [table for _, _, table in work], memory.layout.block_size)
    positions = torch.cat([torch.arange(start, start + len(tokens)) for tokens, start, _ in work])
    hidden = model.forward(torch.cat([tokens for tokens, _, _ in work]), positions, batch, memory)
    return model.logits(hidden)

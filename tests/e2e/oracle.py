"""Hugging Face as oracle: greedy continuations, with prompts chosen so that the best token wins clearly."""

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# 100x the error between our float32 logits and Hugging Face's on these models (measured in tests/engine: below 2e-5).
MIN_MARGIN = 2e-3


@dataclass(frozen=True, slots=True)
class Greedy:
    """A prompt, its greedy continuation, and the smallest lead of the best token over the second."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    margin: float


@lru_cache(maxsize=8)
def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # else it stands in for a None in the call's own config
    return model


def greedy(directory: Path, prompt: list[int], num_tokens: int) -> Greedy:
    """`num_tokens` greedy tokens after `prompt` by Hugging Face's `generate`, in float32, past end tokens."""
    model = _load(directory)
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=_config(num_tokens),
        )
    logits = torch.stack(result.logits)[:, 0].float()
    top = logits.topk(2, dim=-1).values
    output = tuple(result.sequences[0, len(prompt) :].tolist())
    return Greedy(tuple(prompt), output, float((top[:, 0] - top[:, 1]).min()))


def _config(num_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip


def clear_greedy(directory: Path, length: int, num_tokens: int, *, vocab: int, seed: int = 0) -> Greedy:
    """A random prompt of `length` ids whose whole continuation has the margin; its output is the oracle's."""
    for attempt in range(50):
        rng = random.Random(f"{seed}/{length}/{attempt}")
        found = greedy(directory, [rng.randrange(5, vocab) for _ in range(length)], num_tokens)
        if found.margin > MIN_MARGIN:
            return found
    raise AssertionError(f"no prompt of {length} tokens with margin {MIN_MARGIN} in 50 tries")

"""Hugging Face's greedy continuations of the demo model in float32, kept on disk by weights and library version."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.cache_dir import default_cache_dir
from engine.weights_digest import weights_digest


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens after a prompt; per token its log-probability and the lead of its logit over the second best."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]


def continuations(directory: Path, prompts: tuple[str, ...], num_tokens: int) -> list[Continuation]:
    """`num_tokens` greedy tokens (past end-of-sequence tokens) for each prompt."""
    identity = json.dumps([weights_digest(directory).hex(), transformers.__version__, prompts, num_tokens])
    kept = default_cache_dir() / "oracle" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    if not kept.is_file():
        found = _compute(directory, prompts, num_tokens)
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(item) for item in found]), encoding="utf-8")
        partial.replace(kept)
    return [Continuation(**item) for item in json.loads(kept.read_text(encoding="utf-8"))]


def _compute(directory: Path, prompts: tuple[str, ...], num_tokens: int) -> list[Continuation]:
    """`generate` runs all prompts at once, padded on the left; then each is checked alone, without padding."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # generate() would fill it in where ours says None
    width = max(len(prompt) for prompt in ids)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in ids])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in ids])
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # 30 s of one core; more threads than free cores take many times that
    try:
        with torch.inference_mode():
            generated = model.eval().generate(padded, attention_mask=mask, generation_config=config)
            outputs = generated[:, width:].tolist()
            return [_alone(model, prompt, output) for prompt, output in zip(ids, outputs, strict=True)]
    finally:
        torch.set_num_threads(before)


def _alone(model: Any, prompt: list[int], output: list[int]) -> Continuation:
    """One forward over prompt and output, unpadded: its argmax must be `output`."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    if best.indices[:, 0].tolist() != output:
        raise AssertionError("Hugging Face's padded generate and its unpadded forward disagree: choose other prompts")
    return Continuation(
        prompt_token_ids=prompt,
        token_ids=output,
        logprobs=torch.log_softmax(logits, dim=-1).gather(1, best.indices[:, :1])[:, 0].tolist(),
        margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
    )

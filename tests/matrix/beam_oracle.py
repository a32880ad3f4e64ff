"""Hugging Face's own beam search, which ours is compared with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from router.request import BeamSearch

EOS = (2, 60, 90, 120, 140, 200, 221)  # so many that some beam meets one
PROMPTS = [[(7 * i + 3 * k) % 250 + 10 for i in range(9 + 4 * k)] for k in range(3)]
Ends = Callable[[Sequence[int]], bool]


def load_oracle(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def hugging_face(
    oracle: Any,
    prompt: list[int],
    search: BeamSearch,
    max_tokens: int,
    *,
    eos: Sequence[int] = EOS,
    is_stopped: Ends | None = None,
    **options: Any,
) -> list[tuple[list[int], float]]:
    """All outputs with their scores, best first. `is_stopped` says of an output's tokens that its text ends there."""
    from transformers import GenerationConfig, StoppingCriteriaList

    def ends(token_ids: Sequence[int]) -> bool:
        return token_ids[-1] in eos or (is_stopped is not None and is_stopped(token_ids))

    def stopped_rows(rows: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        assert is_stopped is not None
        return torch.tensor([is_stopped(row[len(prompt) :]) for row in rows.tolist()])

    early = "never" if search.early_stopping is None else search.early_stopping
    oracle.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, num_beams=search.num_beams, length_penalty=search.length_penalty,
        early_stopping=early, num_return_sequences=search.num_beams, eos_token_id=list(eos) or None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    if is_stopped is not None:
        options["stopping_criteria"] = StoppingCriteriaList([stopped_rows])
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
            **options,
        )
    outputs = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        lengths = [i + 1 for i in range(len(row)) if ends(row[: i + 1])]
        outputs.append((row[: min(lengths, default=len(row))], score))
    return outputs

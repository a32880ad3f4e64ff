"""Adapters as PEFT itself writes them: the outputs equal Hugging Face's `generate` with the adapter merged by PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import hugging_face, random_prompt
from tests.tiny_adapters import ALL

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own
NUM_TOKENS = 20
LATER = [pytest.param(family, marks=pytest.mark.nightly) for family in ("mixtral", "phi3")]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    "rslora": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[01]\.(self_attn|mlp)\.\w*_proj",
        "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"layers.1.self_attn.q_proj": 20},
    },
    "fused": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "embeddings": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "o_proj", "lm_head"]},
}  # fmt: skip


OTHERS = ("embeddings", "attention", "fused")
"""Not for every family."""


def adapt(model: Any, kind: str, directory: Path) -> Any:
    """Writes an adapter as PEFT does and returns the model with it merged by PEFT."""
    import peft  # 4 s of CPU, in the one test process that has this file

    torch.manual_seed(len(kind))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **KINDS[kind]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            base = adapted.get_base_model().get_submodule(name.partition(".lora_")[0].removeprefix("base_model.model."))
            strength = 0.3 * float(base.weight.detach().std()) if "_B" in name else 1.0
            torch.nn.init.normal_(parameter, std=strength)
    adapted.save_pretrained(directory)
    return adapted.merge_and_unload()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", *LATER])
def test_outputs_equal_the_merged_models(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    path = tiny_model(family)
    # What merging does to a tied head is not what the adapter was trained with, so only llama has these here.
    kinds = [kind for kind in KINDS if kind not in OTHERS or (kind != "fused" and family == "llama")]
    if family == "mixtral":  # its experts are left alone
        kinds = ["attention", "embeddings"]
    if family == "phi3":
        kinds = ["fused", "embeddings"]
    prompts = [random_prompt(11 + 7 * i, seed=i) for i in range(len(kinds) + 1)]
    merged = {kind: adapt(hugging_face(path), kind, tmp_path / kind) for kind in kinds} | {"": hugging_face(path)}
    engine = Engine(
        EngineOptions(
            model=str(path), kernels="torch", cpu_threads=1, kv_cache_memory_bytes=1 << 22, enable_lora=True,
            lora_modules=tuple(f"{kind}={tmp_path / kind}" for kind in kinds),
        )
    )  # fmt: skip
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = engine.generate([prompt.tolist() for prompt in prompts], params, [*kinds, ""])
    for prompt, kind, (output,) in zip(prompts, (*kinds, ""), outputs, strict=True):
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            expected = merged[kind].generate(prompt[None], **settings)[0, len(prompt) :].tolist()
        assert output == expected, kind or "base"

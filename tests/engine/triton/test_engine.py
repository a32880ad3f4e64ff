"""The engine on the Triton kernels, in the interpreter: a tiny model's greedy tokens are Hugging Face's.

A prompt in chunks beside a short one, so that both attention kernels share a step, then a prefix hit, with the
device's sampler: everything that a step on a GPU does but the GPU. The fixture is checked to have its two best logits
further apart than 1e-3 at every position, far beyond what float32 loses here or there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_parts
from engine.device_sampler import DeviceSampler
from engine.engine import Engine
from engine.errors import EngineError, ModelError
from engine.kernel_set import load_kernel_set
from kernels.triton import device as triton_device
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import hugging_face, random_prompt

MARGIN = 1e-3


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


def options(path: Path, **changes: Any) -> EngineOptions:
    fields = {"block_size": 4, "kernels": "triton", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 18}
    return EngineOptions(model=str(path), max_model_len=64, **{**fields, **changes})


def greedy(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    made = hugging_face(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(made.scores).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > MARGIN
    output: list[int] = made.sequences[0, len(prompt) :].tolist()
    return output


def test_greedy_tokens_are_hugging_faces(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen3", num_hidden_layers=2)
    prompts = [random_prompt(length, seed=3).tolist() for length in (3, 45)]
    expected = [greedy(path, prompt, 2) for prompt in prompts]
    engine = Engine(options(path, max_num_batched_tokens=40))
    assert isinstance(engine._runner._sampler, DeviceSampler)  # type: ignore[attr-defined]
    assert engine.numerics_class == "float32/triton/interpreter/tp1"
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert engine.generate(prompts, params) == [
        [tokens] for tokens in expected
    ]  # chunks of 37, beside the first, and of 8
    before = engine.kv_cache.num_free
    assert engine.generate(prompts[1:], params) == [[expected[1]]]  # 44 of them from the cache
    assert engine.kv_cache.num_free == before
    engine.scheduler.check_integrity()
    engine.close()


def test_an_e4m3_cache_gives_the_tokens_of_the_cpus(tiny_model: Callable[..., Path]) -> None:
    """Both store each token with its own scale; the fixture's margins are far beyond what else differs."""
    path, prompt = tiny_model("qwen3", num_hidden_layers=2), random_prompt(21, seed=7).tolist()
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    outputs, pools = [], []
    for kernels in ("triton", "reference"):
        engine = Engine(options(path, kernels=kernels, kv_cache_dtype="fp8", max_num_batched_tokens=16))
        outputs.append(engine.generate([prompt], params))
        assert engine.numerics_class.startswith("float32+kv_fp8_e4m3/")
        pools.append(engine.memory.blocks.clone())
        engine.close()
    assert outputs[0] == outputs[1]
    differing = int((pools[0] != pools[1]).sum())
    assert differing < pools[0].count_nonzero() / 50, "more than what rounding moves"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "mixtral"])
def test_other_families(family: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(family)
    prompt = random_prompt(26, seed=5).tolist()
    engine = Engine(options(path, max_num_batched_tokens=16))
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert engine.generate([prompt], params) == [[greedy(path, prompt, 3)]]
    engine.close()


def test_cuda_without_a_gpu_says_what_is_missing(tiny_model: Callable[..., Path]) -> None:
    for kernels in ("auto", "triton"):
        with pytest.raises(
            ModelError, match=r"kernels = triton on device = cuda: (torch .* is built without CUDA|torch sees no GPU)"
        ):
            build_parts(options(tiny_model("llama"), kernels=kernels, device="cuda"))
    with pytest.raises(ModelError, match="kernels = torch run on the CPU only; device = cuda needs triton"):
        build_parts(options(tiny_model("llama"), kernels="torch", device="cuda"))


def test_what_is_not_served_is_refused(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="quantization = int8: the triton kernels have none"):
        load_kernel_set("triton", quantization="int8")
    path = tiny_model("llama")
    draft = {"speculative_config": f'{{"model": "{path}"}}'}
    refused = {
        "enable_lora": {"enable_lora": True},
        r"speculative_config\.model": draft,
        "kv_cache_dtype = int8": {"kv_cache_dtype": "int8"},
    }
    for what, asked in refused.items():
        with pytest.raises(EngineError, match=f"{what} is not supported with kernels = triton yet"):
            build_parts(options(path, **asked))
    with pytest.raises(EngineError, match="model_impl = transformers is not supported with kernels = triton yet"):
        build_parts(options(path, model_impl="transformers"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match="kernels = triton on device = cpu: CPU tensors need Triton's interpreter"):
        load_kernel_set("triton")
    monkeypatch.setattr(triton_device, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="triton is not installed: pip install 'pagewire"):
        load_kernel_set("triton")

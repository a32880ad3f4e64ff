"""Hugging Face's module over the paged cache: its own tokens, the same bits on every path, and what is refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.engine import Engine
from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from engine.model_config import ModelConfig
from engine.models import transformers_load, transformers_model
from engine.models.transformers_model import TILE_ROWS, tiles
from engine.transformers_config import TransformersConfig, load_config
from kernels import cpu
from kernels.paged import PagedBatch
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import KERNELS, TinyModel, hugging_face, hugging_face_logits, random_prompt

Tiny = Callable[..., Path]
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 112, "max_position_embeddings": 128, "eos_token_id": None,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": SIZES | {"head_dim": 16, "sliding_window": 9, "pad_token_id": 0},
    "gpt_neox": SIZES | {"num_key_value_heads": 4},
    "opt": SIZES | {"ffn_dim": 112, "word_embed_proj_dim": 64, "num_key_value_heads": 4},
    "cohere": SIZES,
    "granite": SIZES | {"logits_scaling": 2.0},
    "olmoe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
}
"""Windows and caps; partial rotation and biases; a decoder of its own; scaled logits; experts."""
NIGHTLY = pytest.mark.nightly
DTYPES = ("float32", "bfloat16")


def make(model_type: str, directory: Path, **values: Any) -> Path:
    """A random model of transformers' own making."""
    config = AutoConfig.for_model(model_type, **(OTHERS.get(model_type, SIZES) | values))
    torch.manual_seed(1)
    module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        mean = 1.0 if parameter.ndim == 1 and float(parameter.detach().mean()) > 0.5 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.15)
    module.save_pretrained(directory)
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    yield
    if cpu.available():
        cpu.load().configure_threads(1)


@pytest.mark.parametrize(
    ("model_type", "kernels"),
    [
        ("gemma2", "native"),
        *(pytest.param(name, "native", marks=NIGHTLY) for name in OTHERS if name != "gemma2"),
        *(pytest.param("gemma2", kernels, marks=NIGHTLY) for kernels in KERNELS if kernels != "native"),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, model_type: str, kernels: str) -> None:
    """In chunks, past the windows, beside others."""
    path = make(model_type, tmp_path)
    tokens = random_prompt(60, seed=3)
    expected = hugging_face_logits(hugging_face(path), tokens)
    run = TinyModel(path, kernels=kernels, model_impl="transformers")
    logits = run.logits(tokens, 23)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(run.logits(tokens, 5), logits)
    assert not run.model.varying


def test_one_shape_is_what_makes_the_bits_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """silu at the end of a tensor (5 rows of 100 are no whole vectors of any size) isn't silu in its middle; nor does
    padding help where rows are of odd length."""
    path, tokens = make("granite", tmp_path / "even", intermediate_size=100), random_prompt(45, seed=3)
    run = TinyModel(path)
    expected = run.logits(tokens, 23)
    assert torch.equal(run.logits(tokens, 5), expected)
    monkeypatch.setattr(transformers_model, "_padded", lambda rows: rows)
    assert not torch.equal(TinyModel(path).logits(tokens, 5), expected)
    monkeypatch.undo()
    assert TinyModel(make("granite", tmp_path / "odd", intermediate_size=101)).model.varying


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("native", "bfloat16"), *(pytest.param(*case, marks=NIGHTLY) for case in product(("native", "torch"), DTYPES))],
)
def test_every_path_gives_the_same_bits(tiny_model: Tiny, kernels: str, dtype: str) -> None:
    path = tiny_model("gpt2", seed=1, dtype=dtype)
    tokens = random_prompt(45, seed=7)
    expected = TinyModel(path, kernels=kernels, block_size=16, model_impl="transformers").logits(tokens)
    run = TinyModel(path, kernels=kernels, model_impl="transformers", threads=2)
    for chunk in (1, 7, TILE_ROWS + 1):
        assert torch.equal(run.logits(tokens, chunk), expected), f"chunks of {chunk}"
    run = TinyModel(path, kernels=kernels, model_impl="transformers")
    place, neighbours = run.place(), [run.place(), run.place()]
    begin = 0
    for step, size in enumerate([20, 1, 17, 1, 6]):
        others = [(other, random_prompt(1 + 6 * (step % 2), seed=i)) for i, other in enumerate(neighbours)]
        logits = run.step(others[0], (place, tokens[begin : begin + size]), *others[1:])[1]
        assert torch.equal(logits, expected[begin : begin + size]), f"tokens from {begin}, beside others"
        begin += size
    load_kernel_set(kernels, threads=1)


def test_an_engine_gives_the_tokens_of_generate(tiny_model: Tiny, cache: None) -> None:
    """Cold, from the cache, in one batch; "auto" takes the fallback for an architecture that pagewire has not."""
    path = tiny_model("gpt2", seed=1)
    oracle = hugging_face(path)
    prompts = [random_prompt(length, seed=length) for length in (3, 17, 40)]
    expected = [oracle.generate(p[None], max_new_tokens=16, do_sample=False, eos_token_id=None)[0] for p in prompts]
    engine = Engine(
        EngineOptions(model=str(path), kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=24, block_size=4)
    )
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        outputs = engine.generate([prompt.tolist() for prompt in prompts], params)
        assert [output[0] for output in outputs] == [
            text[len(prompt) :].tolist() for prompt, text in zip(prompts, expected, strict=True)
        ]
    assert "/transformers-" in engine.numerics_class
    engine.close()
    config = load_config(path)
    assert isinstance(config, TransformersConfig)


def test_auto_takes_pagewires_own_where_there_is_one(tiny_model: Tiny) -> None:
    path = tiny_model("llama", seed=1)
    own, foreign = load_config(path), load_config(path, model_impl="transformers")
    assert isinstance(own, ModelConfig)
    assert isinstance(foreign, TransformersConfig)
    assert own.kv_config() != foreign.kv_config()
    with pytest.raises(ModelError, match=r"architecture 'GPT2LMHeadModel'.* is not supported"):
        load_config(tiny_model("gpt2", seed=1), model_impl="pagewire")
    tokens = random_prompt(30, seed=2)
    logits = [TinyModel(path, model_impl=impl).logits(tokens) for impl in ("pagewire", "transformers")]  # type: ignore[arg-type]
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_options_that_need_pagewires_own_models(tiny_model: Tiny, cache: None) -> None:
    path = str(tiny_model("gpt2", seed=1))
    with pytest.raises(ModelError, match="enable_lora is not supported with model_impl = transformers"):
        Engine(EngineOptions(model=path, enable_lora=True))
    with pytest.raises(ModelError, match="quantization = int8 is not supported with model_impl = transformers"):
        Engine(EngineOptions(model=path, quantization="int8"))


def test_the_clash_of_names_is_explained(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: True)
    with pytest.raises(ModelError, match=r"distribution `kernels` is installed.* \(`pip uninstall kernels`\)"):
        TinyModel(tiny_model("gpt2", seed=1))


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("t5", "T5ForConditionalGeneration", {}, "is an encoder-decoder; only decoders are served"),
    ("bert", "BertForMaskedLM", {}, "is no causal language model of transformers"),
    ("mamba", "MambaForCausalLM", {}, "does not attend through transformers' attention interface"),
    ("bloom", "BloomForCausalLM", {}, "does not attend through transformers' attention interface"),
    (
        "llama4_text",
        "Llama4ForCausalLM",
        SIZES,
        "layer_types has 'chunked_attention'; supported are full_attention",
    ),
    ("gpt2", "GPT2LMHeadModel", {"n_positions": None}, "n_positions|max_position_embeddings"),
    (
        "phi3",
        "Phi3ForCausalLM",
        SIZES
        | {"original_max_position_embeddings": 32, "pad_token_id": 0}
        | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        "'longrope' changes with the length beyond 32 tokens and max_model_len is 128.*lower max_model_len",
    ),
]


def test_configs_that_are_refused(tmp_path: Path) -> None:
    for model_type, name, values, message in REFUSED:
        config = {"model_type": model_type, "architectures": [name]} | values
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=message) as caught:
            load_config(tmp_path, model_impl="transformers")
        assert "config.json" in str(caught.value)


REFUSED_ATTENTION: list[tuple[str, dict[str, Any], str]] = [
    (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4},
        "layer 0 asks its attention for s_aux, which is not supported",
    ),
    (
        "deepseek_v3",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        }
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32},
        r"layer 0 has queries .* and values \[1, 4, 16, 16\]; config.json says 4 heads, 4 kv heads",
    ),
]


def test_attention_that_is_refused(tmp_path: Path) -> None:
    for model_type, values, message in REFUSED_ATTENTION:
        path = make(model_type, tmp_path / model_type, **values)
        with pytest.raises(ModelError, match=message):
            TinyModel(path, model_impl="transformers")


def test_a_module_that_does_something_else_is_found_out(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The proof at start: a wrong attention is refused, rows that depend on others are said in the class."""
    path = tiny_model("gpt2", seed=1)
    attend = transformers_load.attend

    def blurred(*args: Any, **kwargs: Any) -> Any:
        out, weights = attend(*args, **kwargs)
        return out * 0.5, weights

    monkeypatch.setattr(transformers_load, "attend", blurred)
    with pytest.raises(ModelError, match=r"through the paged cache its logits are .* away from transformers' own"):
        TinyModel(path, model_impl="transformers")

    def mixed(*args: Any, **kwargs: Any) -> Any:
        out, weights = attend(*args, **kwargs)
        return out + 1e-6 * out.sum(1, keepdim=True), weights

    monkeypatch.setattr(transformers_load, "attend", mixed)
    run = TinyModel(path, model_impl="transformers")
    assert run.model.varying
    assert "-varying+torch/" in run.model.numerics_class
    assert "depend on what else is in the batch" in caplog.text

    monkeypatch.setattr(transformers_load, "attend", lambda module, query, *_, **__: (query.transpose(1, 2), None))
    with pytest.raises(ModelError, match=r"of its 2 layers \[\] attended through transformers' attention interface"):
        TinyModel(path, model_impl="transformers")


def test_weights_that_are_missing_are_not_made_up(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("gpt2", seed=1)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file({"transformer.wte.weight": torch.zeros(300, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing tensors for GPT2LMHeadModel: transformer\.h\.0\."):
        TinyModel(tmp_path, model_impl="transformers")


def test_an_adapter_in_the_directory_is_not_taken_along(tiny_model: Tiny, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("gpt2", seed=1), tmp_path / "model")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json: model_impl = transformers serves no adapters"):
        TinyModel(path, model_impl="transformers")


def test_tiles_keep_what_each_token_sees() -> None:
    batch = PagedBatch.build([20, 1, 14], [33, 7, 14], [list(range(9)), [9, 10], list(range(11, 15))], 4)
    found = list(tiles(batch))
    assert [rows for rows, _ in found] == [slice(0, 16), slice(16, 32), slice(32, 35)]
    assert [tile.cu_seqlens for _, tile in found] == [(0, 16), (0, 4, 5, 16), (0, 3)]
    assert [tile.kv_lens for _, tile in found] == [(29,), (33, 7, 11), (14,)]
    assert [tile.num_tokens for _, tile in found] == [16, 16, 3]
    assert found[2][1].block_tables[:, :4].tolist() == [[11, 12, 13, 14]]
    assert torch.equal(torch.cat([tile.slot_blocks for _, tile in found]), batch.slot_blocks)

"""Latent attention in a model: bits of a row, what the cache holds, every feature above it, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_parts
from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from engine.lora.checkpoint import modules_of, read_adapter
from engine.lora.errors import AdapterError
from engine.memory import KvLayout
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.weights import Weights, open_weights
from engine.weights_digest import weights_digest
from kernels import cpu
from kernels.routing import GroupLimit
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine
from tests.engine.model_harness import KERNELS, TinyModel, random_prompt
from tests.quantized_checkpoints import Recipe, fp8_blocks, gptq, quantized_copy
from tests.tiny_adapters import make_adapter, merge

Tiny = Callable[..., Path]
MODELS = ("deepseek_v2", "deepseek_v3")
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (3, 22, 37)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, seed=0)
ATTENTION = {
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_depends_on_itself_alone(tiny_model: Tiny, kernels: str, dtype: str) -> None:
    """One token at a time against chunks and a whole prompt beside another, in other blocks; bit for bit."""
    path, tokens = tiny_model("deepseek_v3", seed=1, dtype=dtype), random_prompt(21, seed=7)
    run = TinyModel(path, kernels=kernels, max_tokens=48)
    expected = run.logits(tokens, 1)
    assert expected.std() > 0.5
    assert torch.equal(run.logits(tokens, 5), expected)
    place, other = run.place(), run.place()
    assert torch.equal(run.step((other, random_prompt(11, seed=2)), (place, tokens))[1], expected)


def test_a_token_is_one_cell_in_each_layer(tiny_model: Tiny) -> None:
    """Not K and V of every head; and the keys' root, the fingerprint and the group say so."""
    for family, kv_dtype, size in (("deepseek_v2", "auto", 4 * 48), ("deepseek_v3", "fp8", 48 + 4)):
        engine = make_engine(tiny_model(family), kv_cache_dtype=kv_dtype)
        layers = engine.config.num_layers
        assert engine.memory.buffer.shape[1] == layers * engine.kv_cache.block_size * size
        assert engine.memory.layout.layout_id.startswith(f"canonical/l{layers}.latent.b4.d48/")
        assert engine.kv_cache.groups.layout == f"0:latent:{layers}"
        engine.close()


def test_what_changes_kv_values_is_in_the_keys(tiny_model: Tiny) -> None:
    config = load_model_config(tiny_model("deepseek_v3"))
    assert config.mla is not None
    assert config.moe is not None
    assert config.moe.deepseek is not None
    base = config.kv_config()
    json.dumps(base)
    assert replace(config, mla=replace(config.mla, interleaved=False)).kv_config() != base
    for values in ({"limit": GroupLimit(4, 3, 2)}, {"limit": None}, {"scale": 1.0}, {"scoring": "softmax"}):
        moe = replace(config.moe, deepseek=replace(config.moe.deepseek, **values))
        assert replace(config, moe=moe).kv_config() != base
    assert "mla" not in load_model_config(tiny_model("llama")).kv_config()


FEATURES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 5},
    "preemption": {"num_blocks": 24, "max_model_len": 64, "enable_prefix_caching": False},
    "tiers": {"kv_offloading_size": "1MiB"},
    "n-gram speculation": {"speculative_config": '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'},
    "a draft model": {"speculative_config": '{"num_speculative_tokens": 3, "model": "<model>"}'},
}


@pytest.mark.parametrize("family", ["deepseek_v2", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_features_change_no_token(tiny_model: Tiny, family: str) -> None:
    """Each twice, the second time with a prefix to hit or to load; n > 1 beside greedy requests."""
    path = tiny_model(family)
    kernels = "native" if cpu.available() else "torch"
    params = [GREEDY, SamplingParams(max_tokens=12, n=2, ignore_eos=True, seed=7), GREEDY]
    plain = make_engine(path, kernels=kernels, max_num_batched_tokens=64)
    expected = [plain.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    plain.close()
    for name, options in FEATURES.items():
        filled = {key: v.replace("<model>", str(path)) if isinstance(v, str) else v for key, v in options.items()}
        engine = make_engine(path, kernels=kernels, **filled)
        for _ in range(2):
            assert engine.generate(PROMPTS, params) == expected, name
            if engine.tiers is not None:
                assert engine.tiers.quiesce()
                engine.kv_cache.reset()
        assert bool(engine.scheduler.num_preemptions) == (name == "preemption"), name
        engine.scheduler.check_integrity()
        engine.close()


@pytest.mark.parametrize("family", [pytest.param("deepseek_v2", marks=pytest.mark.nightly), "deepseek_v3"])
def test_adapters_on_what_is_not_absorbed(tiny_model: Tiny, tmp_path: Path, family: str) -> None:
    path = tiny_model(family)
    adapter = make_adapter(path, tmp_path / "adapter", targets=ATTENTION[family])
    merged = make_engine(merge(path, adapter, tmp_path / "merged"), kernels="torch")
    expected = merged.generate(PROMPTS, GREEDY)
    merged.close()
    engine = make_engine(path, kernels="torch", enable_lora=True, lora_modules=(f"tuned={adapter}",))
    outputs = engine.generate([*PROMPTS, PROMPTS[0]], GREEDY, ["tuned"] * 3 + [""])
    assert outputs[:3] == expected
    assert outputs[3] != expected[0]
    modules = modules_of(engine._runner._model.adaptable)  # type: ignore[attr-defined]
    absorbed = make_adapter(path, tmp_path / "absorbed", targets=("kv_b_proj",))
    with pytest.raises(AdapterError, match=r"kv_b_proj.* belongs to no module that can be adapted here; those are"):
        read_adapter(absorbed, load_model_config(path), modules, 8)
    engine.close()


@pytest.mark.parametrize("kernels", KERNELS[1:])
def test_quantized_caches_and_weights(tiny_model: Tiny, kernels: str) -> None:
    """The same tokens in any chunks; which they are is another matter."""
    if kernels == "native" and not cpu.available():
        pytest.skip(cpu.why_unavailable())
    path = tiny_model("deepseek_v2")
    for options in ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "w8a8"}):
        outputs = []
        for size in (64, 7):
            engine = make_engine(path, kernels=kernels, max_num_batched_tokens=size, **options)
            outputs.append(engine.generate(PROMPTS, GREEDY))
            engine.close()
        assert outputs[0] == outputs[1], options


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())
def test_absorbed_matrices_are_packed_once_and_mapped(tiny_model: Tiny, tmp_path: Path) -> None:
    path, tokens = tiny_model("deepseek_v3", seed=1), random_prompt(9, seed=1)
    run = TinyModel(path, kernels="native", max_tokens=40, num_sequences=3)
    expected, files = run.logits(tokens), set()
    for _ in range(2):  # written, then mapped
        digest = weights_digest(path, cache_dir=tmp_path)
        run.model = load_model(run.config, load_kernel_set("native"), cache_dir=tmp_path, digest=digest)
        assert torch.equal(run.logits(tokens), expected)
        files |= {file.stat().st_ino for file in (tmp_path / "packed").iterdir() if file.suffix != ".lock"}
    assert len(files) == 1


@pytest.mark.parametrize("kernels", KERNELS[1:])
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("deepseek_v2", gptq(group_size=-1, act_order=True, kept=("lm_head", "mlp.gate."))),
        ("deepseek_v3", fp8_blocks((128, 128), kept=("lm_head", "mlp.gate."))),  # as its own checkpoint is
    ],
    ids=["gptq", "fp8 by block"],
)
def test_a_quantized_checkpoint_counts_as_what_it_stands_for(
    tiny_model: Tiny, tmp_path: Path, family: str, recipe: Recipe, kernels: str
) -> None:
    """Also of the matrices that are cut by head, transposed and absorbed."""
    quantized, dense = quantized_copy(tiny_model(family, seed=1), tmp_path, recipe)
    tokens = random_prompt(20, seed=3)
    expected, found = (TinyModel(path, kernels=kernels).logits(tokens) for path in (dense, quantized))
    assert (found - expected).abs().max() < 1e-3


def test_a_matrix_that_is_cut_by_head_is_read_once(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = list[str](), Weights.matrix

    def noted(self: Weights, name: str, shape: tuple[int, int]) -> Any:
        read.append(name)
        return original(self, name, shape)

    monkeypatch.setattr(Weights, "matrix", noted)
    TinyModel(tiny_model("deepseek_v2"), kernels="torch")
    assert [name for name in read if name.endswith("kv_b_proj")] == [f"layers.{i}.self_attn.kv_b_proj" for i in (0, 1)]


def test_the_router_keeps_its_bits(tiny_model: Tiny, tmp_path: Path) -> None:
    """Stored in float32 beside bfloat16, and in a copy converted from float32."""
    name = "layers.1.mlp.gate.e_score_correction_bias"
    stored = load_file(tiny_model("deepseek_v3", seed=1) / "model.safetensors")[f"model.{name}"]
    assert not torch.equal(stored.bfloat16().float(), stored)
    for dtype in ("float32", "bfloat16"):
        path = tiny_model("deepseek_v3", seed=1, dtype=dtype)
        weights = open_weights(path, torch.bfloat16, cache_dir=tmp_path)
        assert torch.equal(weights.take(name, (8,), torch.float32), stored)
        router = load_file(path / "model.safetensors")["model.layers.1.mlp.gate.weight"]
        assert torch.equal(weights.take("layers.1.mlp.gate.weight", (8, 64), torch.float32), router.float())
        assert weights.take("layers.1.mlp.gate.weight", (8, 64)).dtype == torch.bfloat16


def test_layers_that_guess_tokens_further_on_are_left_alone(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("deepseek_v3", seed=1)
    tensors = load_file(path / "model.safetensors") | {"model.layers.3.eh_proj.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    for num_more in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_more}))
        if num_more:
            assert torch.equal(
                TinyModel(tmp_path).logits(random_prompt(5, 1)), TinyModel(path).logits(random_prompt(5, 1))
            )
        else:
            with pytest.raises(ModelError, match=r"not part of this architecture: model\.layers\.3\.eh_proj"):
                TinyModel(tmp_path)


_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_SIZES = {
    "vocab_size": 102400, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 10000, "max_position_embeddings": 163840,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 8, "topk_group": 4,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
        "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1, "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "Moonlight": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    },
}  # fmt: skip


def test_published_configs(tmp_path: Path) -> None:
    """What the hub's config.json say, and what the cache has of a token."""
    expected = {
        "V2-Lite": (27 * 576 * 2, 0.114721, None, range(27, 27)),
        "V3": (61 * 576 * 2, 0.135234, GroupLimit(8, 4, 2), range(61, 62)),
        "Moonlight": (27 * 576 * 2, 192**-0.5, None, range(27, 27)),
    }
    for name, values in PUBLISHED.items():
        (tmp_path / "config.json").write_text(json.dumps(_SIZES | values))
        config = load_model_config(tmp_path)
        num_bytes, scale, limit, unserved = expected[name]
        assert KvLayout.of(config, 16).block_bytes == 16 * num_bytes, name
        assert config.attention_scale == pytest.approx(scale, rel=1e-5), name
        assert config.moe is not None
        assert config.moe.deepseek is not None
        assert (config.moe.deepseek.limit, config.unserved_layers) == (limit, unserved), name


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a positive integer"),
    ("deepseek_v2", {"kv_lora_rank": 1020}, r"kv_lora_rank \+ qk_rope_head_dim is 1020 \+ 8; it must be at most 1024"),
    ("deepseek_v2", {"qk_rope_head_dim": 7}, "an even rotary dimension, but got `head_dim`=7"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2; with latent attention it must be 4"),
    ("deepseek_v2", {"sliding_window": 8}, "sliding_window is 8; with latent attention there can be none"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; .* greedy or group_limited_greedy"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
    (
        "deepseek_v2",
        {"scoring_func": "sigmoid"},
        "scoring_func is 'sigmoid'; with this architecture it must be softmax",
    ),
    ("deepseek_v2", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; it must be a positive number"),
    ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ("deepseek_v3", {"n_group": 3}, "n_group is 3; it must divide 8 experts into groups of 2 at least"),
    ("deepseek_v3", {"n_group": 8}, "n_group is 8; it must divide 8 experts into groups of 2 at least"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group is 5; it must be at most n_group, 4"),
    ("deepseek_v3", {"topk_group": 1}, "topk_group is 1; it must .* leave 3 experts to choose from"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; .* noaux_tc"),
]


@pytest.mark.parametrize(("family", "interleaved"), [("deepseek_v2", True), ("deepseek_v3", False)])
def test_pairs_in_halves_are_v3s_alone(tiny_model: Tiny, tmp_path: Path, family: str, interleaved: bool) -> None:
    """transformers' V2 doesn't know the field."""
    whole = json.loads((tiny_model(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | {"rope_interleave": False}))
    config = load_model_config(tmp_path)
    assert config.mla is not None
    assert config.mla.interleaved == interleaved


def test_configs_that_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    for family, values, message in REFUSED:
        whole = json.loads((tiny_model(family) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(whole | values))
        with pytest.raises(ModelError, match=message) as caught:
            load_model_config(tmp_path)
        assert "config.json" in str(caught.value)


def test_options_that_are_refused(tiny_model: Tiny) -> None:
    path = str(tiny_model("deepseek_v2"))
    with pytest.raises(ModelError, match="latent attention is not supported with kernels = triton yet"):
        build_parts(EngineOptions(model=path, kernels="triton"))

"""Quantized checkpoints: read exactly, the same greedy tokens as transformers on what they stand for, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import EngineError, ModelError
from engine.kernel_set import load_kernel_set
from engine.model_config import load_model_config
from engine.models.decoder import EMBEDDING
from engine.models.registry import load_model
from engine.quantized.config import parse_quantization
from engine.weights import map_weights
from engine.weights_digest import weights_digest
from kernels import cpu
from kernels.cpu import packed, packed_groups
from kernels.grouped import GroupedMatrix
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import TinyModel, hugging_face, hugging_face_logits, random_prompt
from tests.quantized_checkpoints import Recipe, awq, fp8, fp8_blocks, gptq, pack_quantized, quantized_copy

Tiny = Callable[..., Path]
NATIVE = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())
KERNELS = ("torch", "native") if cpu.available() else ("torch",)

RECIPES: dict[str, Recipe] = {
    "gptq": gptq(),
    "gptq symmetric, whole rows": gptq(group_size=-1, symmetric=True, dtype=torch.bfloat16, g_idx=False),
    "gptq act-order": gptq(act_order=True, dtype=torch.bfloat16),
    "gptq v2, lm_head too": gptq(group_size=64, v2=True, kept=()),
    "gptq 8 bits": gptq(bits=8, group_size=128),
    "awq": awq(),
    "awq, whole rows, a layer left alone": awq(-1, dtype=torch.bfloat16, kept=("lm_head", "layers.1.")),
    "w4a16": pack_quantized(),
    "w4a16 with zero points, act-order": pack_quantized(symmetric=False, act_order=True),
    "w8a16 by row": pack_quantized(bits=8, group_size=-1),
    "fp8 by matrix": fp8(by_row=False),
    "fp8 by row, lm_head too": fp8(by_row=True, kept=()),
    "fp8 by block": fp8_blocks((24, 32)),
    "fp8 by block, whole rows": fp8_blocks((128, 128), dtype=torch.bfloat16),
    "fp8 of one scale": fp8_blocks(None),
}
Make = Callable[..., tuple[Path, Path]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def make(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Quantized and dense; one copy of each recipe and model, not to be changed."""
    done: dict[object, tuple[Path, Path]] = {}

    def made(recipe: Recipe, family: str = "llama", **overrides: Any) -> tuple[Path, Path]:
        more: dict[str, Any] = {"seed": 1, "intermediate_size": 96} | ({} if recipe.kept else {"vocab_size": 304})
        more |= {} if family == "gemma3" else {"num_hidden_layers": 2}
        key = (id(recipe), family, *overrides.items())
        if key not in done:
            done[key] = quantized_copy(tiny_model(family, **(more | overrides)), tmp_path_factory.mktemp("q"), recipe)
        return done[key]

    return made


@pytest.fixture
def broken(make: Make, tmp_path: Path) -> Path:
    """A quantized model to change."""
    return shutil.copytree(make(RECIPES["gptq"])[0], tmp_path / "broken")


def edit(path: Path, **changes: Any) -> None:
    """Change quantization_config; a value of None takes the field away."""
    config = json.loads((path / "config.json").read_text())
    fields = config["quantization_config"] | changes
    config["quantization_config"] = {name: value for name, value in fields.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def test_every_matrix_is_what_it_stands_for(make: Make) -> None:
    """To the bit, number by number; what isn't quantized is read as it is."""
    for name, recipe in RECIPES.items():
        path, dense = make(recipe)
        weights = map_weights(path, torch.float32, load_model_config(path).quantization)
        num_quantized = 0
        for tensor_name, expected in load_file(dense / "model.safetensors").items():
            if not tensor_name.endswith("weight") or expected.dim() != 2:
                continue
            module, shape = tensor_name.removeprefix("model.").removesuffix(".weight"), tuple(expected.shape)
            found = weights.matrix(module, (shape[0], shape[1]))
            if isinstance(found, GroupedMatrix):
                num_quantized += 1
                found = found.dequantized()
            assert torch.equal(found, expected), (name, tensor_name)
        skipped = 7 if "layers.1." in recipe.kept else 0
        assert num_quantized == 2 * 7 - skipped + (not recipe.kept), name


# Seeds whose margins are wide enough at every step; the test checks that they are.
@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        ("gptq", "llama", 1),
        ("gptq act-order", "qwen2", 1),
        ("gptq 8 bits", "gemma3", 1),
        pytest.param("gptq v2, lm_head too", "llama", 1, marks=pytest.mark.nightly),
        ("awq", "qwen3", 1),
        pytest.param("w4a16 with zero points, act-order", "llama", 1, marks=pytest.mark.nightly),
        ("fp8 by row, lm_head too", "llama", 1),
        ("fp8 by block", "qwen3", 1),
    ],
)
def test_the_tokens_are_transformers(make: Make, name: str, family: str, seed: int, cache: Path) -> None:
    path, dense = make(RECIPES[name], family, seed=seed)
    prompt = random_prompt(21, seed=seed)
    oracle = hugging_face(dense)
    output = oracle.generate(prompt[None], max_new_tokens=16, do_sample=False)[0, 21:].tolist()
    exact = hugging_face_logits(oracle, torch.tensor([*prompt.tolist(), *output]))[20:-1]
    best = exact.topk(2).values
    for kernels in KERNELS:
        run = TinyModel(path, kernels=kernels, max_tokens=40, num_sequences=2)
        error = (run.logits(torch.tensor([*prompt.tolist(), *output]))[20:-1] - exact).abs().max()
        assert error < 1e-3 * exact.abs().max(), kernels
        assert (best[:, 0] - best[:, 1]).min() > 10 * error, "the margins are too small: choose another seed"
        assert run.greedy(prompt, 16, chunk=5) == output, kernels


def options(path: Path, **fields: Any) -> EngineOptions:
    common = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 64, "cpu_threads": 1}
    return EngineOptions(model=str(path), **(common | fields))


@NATIVE
@pytest.mark.parametrize(("name", "dtype"), [("gptq act-order", "bfloat16"), ("awq", "float32")])
def test_the_same_tokens_in_any_company(make: Make, cache: Path, name: str, dtype: str) -> None:
    """Alone, batched, chunked, on other threads, with drafts, from a mapped file; and classes and keys of their own."""
    path, dense = make(RECIPES[name])
    prompts = [random_prompt(length, seed=length).tolist() for length in (1, 7, 40)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    label = "awq4g32" if name == "awq" else "gptq4g32"
    outputs = []
    for more in ({}, {"cpu_threads": 2}, {"speculative_config": drafts}, {"max_num_batched_tokens": 5}):
        engine = Engine(options(path, kernels="native", dtype=dtype, **more))
        assert engine.numerics_class == f"{dtype}+{label}/native/{cpu.load().isa}/tp1"
        outputs.append(engine.generate(prompts, params))
        if not more:
            outputs.append([engine.generate([prompt], params)[0] for prompt in prompts])
            root = engine.root
        assert engine.root == root
        engine.close()
    cpu.load().configure_threads(1)
    assert outputs[1:] == outputs[:1] * 4
    (file,) = (path for path in (cache / "packed").iterdir() if path.suffix != ".lock")
    assert file.name.endswith(f"-{packed.LAYOUT}-{packed_groups.LAYOUT}-{label}")  # releases differ in how groups lie
    engine = Engine(options(dense, kernels="native", dtype=dtype))
    assert engine.root != root
    engine.close()


@NATIVE
def test_packed_weights_stay_small(make: Make, cache: Path) -> None:
    """Four bits a number, a scale and an offset for 128; the mapped file gives the bits of private memory."""
    path, dense = make(gptq(group_size=128), hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    sizes = []
    for directory in (path, dense):
        run = TinyModel(directory, kernels="native", dtype="bfloat16", max_tokens=40, num_sequences=3)
        expected = run.logits(random_prompt(9, seed=1))
        for _ in range(2):  # written, then mapped
            digest = weights_digest(directory, cache_dir=cache)
            run.model = load_model(run.config, load_kernel_set("native"), cache_dir=cache, digest=digest)
            assert torch.equal(run.logits(random_prompt(9, seed=1)), expected)
        qkv = run.model.blocks[0].attention.qkv  # type: ignore[attr-defined]
        sizes.append(qkv.nbytes)
    assert sizes[0] == sizes[1] * (4 + (16 + 32) / 128) / 16  # float16 scales, float32 offsets


def test_what_a_token_reads(make: Make, tiny_model: Tiny) -> None:
    """The sizes of what was packed: what is left dense counts as such, and of experts those that a token goes through.

    Kernels that expand the numbers read them so.
    """
    path, _ = make(gptq(group_size=128), hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    config = load_model_config(path)
    head, numbers = 2 * 300 * 128, (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 128
    numbers += 3 * 128 * 128
    read = {kernels: TinyModel(path, kernels=kernels, dtype="bfloat16").model.num_bytes_read for kernels in KERNELS}
    assert read["torch"] == head + 2 * numbers
    if "native" in read:
        padded = 2 * 320 * 128
        assert read["native"] == padded + numbers * (4 + (16 + 32) / 128) / 8
    for quantization, width in (("none", 4), ("w8a8", 1)):
        config = load_model_config(tiny_model("mixtral", seed=1), dtype="float32")
        model = load_model(config, load_kernel_set("torch", quantization=None if width == 4 else quantization))
        assert config.moe is not None
        experts = [size for projection, size in model.packed_bytes.items() if not projection.adaptable]
        others = sum(size for projection, size in model.packed_bytes.items() if projection.adaptable)
        assert len(experts) == 2 * config.moe.num_experts * config.num_layers
        embedding = next(size for projection, size in model.packed_bytes.items() if projection.names == EMBEDDING)
        share = config.moe.top_k / config.moe.num_experts
        assert model.num_bytes_read == int(others - embedding + sum(experts) * share)
        rows = config.vocab_size
        assert embedding == rows * (config.hidden_size * width + (0 if width == 4 else 4))


@NATIVE
def test_fused_projections_are_mapped(make: Make, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Phi-3 stores q, k and v, and gate and up, in one quantized tensor each."""
    path, _ = make(RECIPES["gptq"], "phi3")
    run = TinyModel(path, kernels="native", max_tokens=40, num_sequences=3)
    expected, inodes = run.logits(random_prompt(9, seed=1)), set()
    for _ in range(2):  # written, then mapped
        digest = weights_digest(path, cache_dir=cache)
        run.model = load_model(run.config, load_kernel_set("native"), cache_dir=cache, digest=digest)
        assert torch.equal(run.logits(random_prompt(9, seed=1)), expected)
        inodes |= {file.stat().st_ino for file in (cache / "packed").iterdir() if file.suffix != ".lock"}
    assert len(inodes) == 1
    assert "packed again" not in caplog.text
    assert "can't be shared" not in caplog.text


def test_tokens_of_other_conventions_are_foreign(broken: Path, cache: Path) -> None:
    """Equal tensors mean other weights when the config says so: the block keys differ."""
    roots = set()
    for stored in ("gptq", "gptq_v2"):
        edit(broken, checkpoint_format=stored)
        engine = Engine(options(broken, kernels="torch"))
        roots |= {engine.root, engine.numerics_class}
        engine.close()
    assert len(roots) == 4


@pytest.mark.parametrize(
    ("field", "value", "tensor"), [("symmetric", True, "weight_zero_point"), ("actorder", None, "weight_g_idx")]
)
def test_tensors_that_the_config_denies_are_refused(
    make: Make, tmp_path: Path, cache: Path, field: str, value: object, tensor: str
) -> None:
    """Without them the weights would be wrong; the packed file of the right config is not found either."""
    path = shutil.copytree(make(RECIPES["w4a16 with zero points, act-order"])[0], tmp_path / "denied")
    engine = Engine(options(path, kernels=KERNELS[-1]))
    assert "+w4a16g32zpactorder/" in engine.numerics_class
    engine.close()
    groups = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["weights"][field] = value
    edit(path, config_groups=groups)
    for kernels in KERNELS:
        with pytest.raises(EngineError, match=rf"q_proj: tensor {tensor} is there although quantization_config"):
            Engine(options(path, kernels=kernels))


GPTQ_FIELDS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quip"}, r"quantization_config.quant_method is 'quip'; supported: gptq, awq, compressed-tensors"),
    ({"quant_method": None}, r"quantization_config.quant_method is None"),
    ({"bits": 3}, r"quantization_config.bits is 3; supported: 4, 8"),
    ({"bits": True}, r"quantization_config.bits is True"),
    ({"group_size": 48}, r"quantization_config.group_size is 48; supported: -1, 32, 64 or a multiple of 128"),
    ({"group_size": None}, r"quantization_config.group_size is None"),
    ({"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
    ({"desc_act": "yes"}, r"desc_act is 'yes'"),
    ({"dynamic": {"+:.*": {"bits": 8}}}, r"dynamic is .*; supported: none"),
    ({"quant_method": "awq", "version": "gemv"}, r"version is 'gemv'; supported: gemm"),
    ({"quant_method": "awq", "bits": 8}, r"bits is 8; supported: 4"),
    ({"quant_method": "awq", "zero_point": False}, r"zero_point is False; supported: True"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt is 'e5m2'; supported: e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128, 48]}, r"weight_block_size is \[128, 48\]; supported: none, or"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
    ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size is 128"),
]


REFUSED_COMPRESSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("w4a16", "", {"format": "int-quantized"}, "format is 'int-quantized'; supported: pack-quantized, float-quantized"),
    (
        "w4a16",
        "",
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme.type is 'int'; supported: float",
    ),
    ("w4a16", "", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*; supported: none"),
    ("w4a16", "", {"config_groups": {"a": {}, "b": {}}}, "config_groups is .*; supported: one group"),
    ("w4a16", "group", {"targets": ["re:.*q_proj"]}, r"group_0.targets is .*; supported: \['Linear'\]"),
    ("w4a16", "group", {"input_activations": {"num_bits": 8}}, "group_0.input_activations is .*; supported: none"),
    ("w4a16", "weights", {"num_bits": 2}, "weights.num_bits is 2; supported: 4, 8"),
    ("w4a16", "weights", {"group_size": 16}, "weights.group_size is 16; supported: -1, 32, 64 or a multiple of 128"),
    ("w4a16", "weights", {"strategy": "tensor"}, "weights.strategy is 'tensor'; supported: group, channel"),
    ("w4a16", "weights", {"actorder": "random"}, "weights.actorder is 'random'"),
    ("fp8 by matrix", "weights", {"strategy": "block"}, "weights.strategy is 'block'; supported: tensor, channel"),
    ("fp8 by matrix", "weights", {"dynamic": True}, "weights.dynamic is True; supported: none"),
    ("fp8 by matrix", "weights", {"type": "int"}, "weights.type is 'int'; supported: float"),
]


def test_what_is_not_supported_is_named(broken: Path) -> None:
    for changes, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            parse_quantization(GPTQ_FIELDS | changes)
    for recipe, at, changes, message in REFUSED_COMPRESSED:
        config = json.loads(json.dumps(RECIPES[recipe].config))
        fields = config["config_groups"]["group_0"] if at else config
        (fields["weights"] if at == "weights" else fields).update(changes)
        with pytest.raises(ValueError, match=message):
            parse_quantization(config)
    with pytest.raises(ValueError, match="quantization_config is a list; it must be an object"):
        parse_quantization([])
    edit(broken, bits=2)
    with pytest.raises(ModelError, match=r"config.json: quantization_config.bits is 2; supported: 4, 8"):
        load_model_config(broken)


NAME = "model.layers.1.mlp.down_proj"


Change = Callable[[dict[str, torch.Tensor]], object]
BROKEN: list[tuple[Change, str]] = [
    (lambda t: t.pop(f"{NAME}.scales"), rf"{NAME}: tensor scales \[3, 64\] is missing"),
    (lambda t: t.pop(f"{NAME}.qweight"), rf"tensor {NAME}.weight \[64, 96\] is missing"),
    (
        lambda t: t.update({f"{NAME}.qzeros": t[f"{NAME}.qzeros"][:2]}),
        rf"{NAME}: tensor qzeros is \[2, 8\]; config and quantization_config ask for \[3, 8\]",
    ),
    (
        lambda t: t.update({f"{NAME}.scales": t[f"{NAME}.scales"].int()}),
        rf"{NAME}: tensor scales is int32; it must be float16 or bfloat16 or float32",
    ),
    (lambda t: t[f"{NAME}.g_idx"].__setitem__(5, 3), rf"{NAME}: tensor g_idx has group 3; there are groups 0 to 2"),
    (lambda t: t[f"{NAME}.g_idx"].__setitem__(5, -1), rf"{NAME}: tensor g_idx has group -1"),
    (lambda t: t[f"{NAME}.g_idx"].__setitem__(5, 1), r"g_idx has 31 columns of group 0; group_size is 32"),
    (
        lambda t: t[f"{NAME}.scales"].__setitem__((1, 7), torch.inf),
        rf"{NAME}: row 7 of \[64, 96\] has scales with an",
    ),
    (lambda t: t.update({f"{NAME}.bias": torch.ones(64)}), rf"not part of this architecture: {NAME}.bias"),
    (lambda t: t.update({f"{NAME}.extra": torch.ones(64)}), rf"not part of this architecture: {NAME}.extra"),
]


def test_broken_checkpoints_are_named(make: Make, tmp_path: Path) -> None:
    for number, (change, message) in enumerate(BROKEN):
        path = shutil.copytree(make(RECIPES["gptq"])[0], tmp_path / str(number))
        edit_tensors(path, change)
        with pytest.raises(ModelError, match=message):
            load_model(load_model_config(path), load_kernel_set("torch"))


@NATIVE
def test_matrices_in_different_orders(broken: Path, cache: Path) -> None:
    """k's groups are of other columns than q's and v's: it is a part by itself. Gate and up must have one order."""

    def scatter(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.g_idx"].copy_(torch.arange(64) % 2)

    edit_tensors(broken, scatter)
    prompt = random_prompt(9, seed=1)
    runs = {kernels: TinyModel(broken, kernels=kernels, max_tokens=40, num_sequences=3) for kernels in KERNELS}
    expected, found = (runs[kernels].logits(prompt) for kernels in ("torch", "native"))
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    digest = weights_digest(broken, cache_dir=cache)
    for _ in range(2):  # written, then mapped
        model = load_model(runs["native"].config, load_kernel_set("native"), cache_dir=cache, digest=digest)
        runs["native"].model = model
        assert torch.equal(runs["native"].logits(prompt), found)
    edit_tensors(broken, lambda t: t["model.layers.0.mlp.up_proj.g_idx"].copy_(torch.arange(64) // 32 ^ 1))
    with pytest.raises(ModelError, match=r"layers.0.mlp.gate_proj.*: gate and up must have .* in one order"):
        load_model(load_model_config(broken), load_kernel_set("native"))


def test_broken_compressed_tensors_are_named(make: Make, tmp_path: Path) -> None:
    cases: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
        (
            "w4a16",
            lambda t: t[f"{NAME}.weight_shape"].fill_(1),
            rf"{NAME}: tensor weight_shape says \[1, 1\]; .* \[64, 96\]",
        ),
        ("w4a16", lambda t: t.pop(f"{NAME}.weight_scale"), rf"{NAME}: tensor weight_scale \[64, 3\] is missing"),
        (
            "fp8 by row, lm_head too",
            lambda t: t.pop("lm_head.weight_scale"),
            "tensor lm_head.weight is F8_E4M3 with no scales",
        ),
        (
            "fp8 by row, lm_head too",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(1)}),
            rf"{NAME}: tensor weight_scale is \[1\]; .* ask for \[64, 1\]",
        ),
        (
            "fp8 by block",
            lambda t: t.update({f"{NAME}.weight_scale_inv": torch.ones(3, 2)}),
            rf"{NAME}: tensor weight_scale_inv is \[3, 2\]; .* ask for \[3, 3\]",
        ),
        (
            "fp8 by matrix",
            lambda t: t[f"{NAME}.weight"].view(torch.uint8).__setitem__((3, 5), 0x7F),
            r"layers.1.mlp.down_proj: row 3 of \[64, 96\] has a NaN",
        ),
    ]
    for number, (recipe, change, message) in enumerate(cases):
        path = shutil.copytree(make(RECIPES[recipe])[0], tmp_path / str(number))
        edit_tensors(path, change)
        with pytest.raises(ModelError, match=message):
            load_model(load_model_config(path), load_kernel_set("torch"))


def test_biases_of_zeros_are_no_biases(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({f"{NAME}.bias": torch.zeros(64)}))
    load_model(load_model_config(broken), load_kernel_set("torch"))


def test_quantizing_again_is_refused(broken: Path) -> None:
    with pytest.raises(ModelError, match=r"quantization = int8: the checkpoint is quantized already \(gptq4g32\)"):
        load_model(load_model_config(broken), load_kernel_set("torch", quantization="int8"))


def test_matrices_quantized_in_part_are_refused(make: Make) -> None:
    path, _ = make(gptq(kept=("lm_head", "layers.1.self_attn.k_proj")))
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj.*: matrices over one input must be quantized all"):
        load_model(load_model_config(path), load_kernel_set("torch"))


def test_static_scales_of_the_kv_cache_are_named(
    make: Make, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are left alone with a warning: each token has a scale of its own, and nothing is computed otherwise."""
    path = shutil.copytree(make(RECIPES["w4a16"])[0], tmp_path / "scaled")
    plain = TinyModel(path, kernels="torch").logits(random_prompt(9, seed=1))
    edit(
        path,
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    )
    tensors = load_file(path / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor([0.5]) for kind in "kv"}
    save_file(tensors | scales, path / "model.safetensors")
    assert torch.equal(TinyModel(path, kernels="torch").logits(random_prompt(9, seed=1)), plain)
    assert "2 static scales of the KV cache are not used, from model.layers.0.self_attn.k_scale on" in caplog.text

"""What is refused, and with which reason; and the store's names, limits and paths."""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.lora.checkpoint import modules_of, read_adapter
from engine.lora.config import read_lora_config
from engine.lora.errors import AdapterError, AdapterLimit, AdapterNotFound, AdapterOutdated
from engine.lora.store import LINGER_SECONDS, TAKE_BACK_SECONDS, AdapterStore, parse_lora_modules
from engine.model_config import load_model_config
from engine.safetensors_file import FileInMemory
from engine.weight_source import Projection
from router.adapter_keeper import LOAD_SECONDS
from router.prefix_admin import ACTION_SECONDS
from tests.tiny_adapters import make_adapter

KV = 32
LAYER = (
    Projection(tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"), (64, KV, KV), 64),
    Projection(("layers.{}.self_attn.o_proj",), (64,), 64),
    Projection(("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), (112, 112), 64, gated=True),
    Projection(("layers.{}.mlp.down_proj",), (64,), 112),
)  # fmt: skip
PROJECTIONS = [
    Projection(("embed_tokens",), (300,), 64),
    *(
        Projection(tuple(name.format(layer) for name in each.names), each.num_outs, each.num_in)
        for layer in range(3)
        for each in LAYER
    ),
    Projection(("lm_head",), (300,), 64),
]
MODULES = modules_of(PROJECTIONS)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(model, tmp_path / "adapter", targets=("q_proj", "embed_tokens"))


def change_config(directory: Path, **values: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def read(model: Path, directory: Path, max_rank: int = 16) -> Any:
    return read_adapter(directory, load_model_config(model), MODULES, max_rank)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': it belongs to a changed base model"),
        ({"r": 0}, "r is 0; it must be a positive integer"),
        ({"r": 17}, r"has rank 17, the limit \(max_lora_rank\) is 16"),
        ({"r": 5}, r"lora_A.weight is \[4, 64\]; rank 5 .* ask for \[5, 64\]|lora_embedding_A is \[4, 300\]; rank 5"),
        ({"lora_alpha": "many"}, "lora_alpha is 'many'"),
        ({"lora_alpha": 10**400}, "lora_alpha is '10000000+'; it must be a finite number"),
        ({"lora_alpha": 1e300}, "B(.weight)? has values that are not finite in float32 after scaling by 2.5e.299"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"rank_pattern has '\(a\+\)\+\$'"),
        ({"rank_pattern": {"q_proj": 99}}, "rank 99, the limit"),
        ({"rank_pattern": {f"q{i}": 4 for i in range(4097)}}, "rank_pattern has 4097 entries, must have at most 4096"),
        ({"target_modules": ["q_proj"] * 4097}, "target_modules has 4097 entries, must have at most 4096"),
        ({"target_modules": ["q_proj", "c_attn"]}, "target module 'c_attn' is not one of this model's"),
        ({"target_modules": ["q_proj", "v_proj"]}, "has no tensor of target module 'v_proj'"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_served(model: Path, adapter: Path, config: dict[str, Any], reason: str) -> None:
    change_config(adapter, **config)
    with pytest.raises(AdapterError, match=reason):
        read(model, adapter)


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(96, 4)}), r"lora_B.weight is \[96, 4\].*\[64, 4\]"),
        (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), "q_proj.lora_A.weight has values that are not finite"),
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "module layers.0.self_attn.q_proj has no lora_B"),
        (_rename(f"{Q}.lora_A.weight", "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"),
         "layers.9.self_attn.q_proj.lora_A.weight belongs to no module"),
        (lambda t: t.update({"base_model.model.vision.fc.lora_A.weight": torch.zeros(4, 4)}), "vision.fc"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(4)}), "lora_magnitude_vector"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}), "is I8; supported are F32"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.base_layer.weight": torch.zeros(300, 64)}),
         "embed_tokens.base_layer.weight is not this model's"),
        (lambda t: t.update({Q.removeprefix("base_model.") + ".lora_A.weight": torch.zeros(4, 64)}), "lora_A.weight"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    model: Path, adapter: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match=reason):
        read(model, adapter)


def test_files_that_are_missing_pickled_or_broken(model: Path, adapter: Path) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(AdapterError, match="is cut short"):
        read(model, adapter)
    weights.write_bytes(b"\x80\x04pickle")
    with pytest.raises(AdapterError, match="not a safetensors file"):
        read(model, adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"no such file \(adapter_model.bin is pickled, which is never loaded\)"):
        read(model, adapter)
    config.write_text("[" * 100_000)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read(model, adapter)
    config.unlink()
    with pytest.raises(AdapterError, match=r"needs adapter_config\.json"):
        read(model, adapter)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[]", "header is a list, not a JSON object"),
        (b"[" * 100_000, "header is not JSON"),
        (b'{"x": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}', "tensor x has a header"),
        (b'{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 16]}}', "tensor x has a header"),
        (b'{"x": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}', "tensor x has a header"),
        (b'{"x": {"dtype": "F32", "shape": [1' + b"0" * 60 + b'], "data_offsets": [0, 16]}}', "tensor x has a header"),
        (b'{"x": {"dtype": "F32", "shape": ' + b"[4000000000," * 3 + b'4]]], "data_offsets": [0, 16]}}', "x has a"),
        (b'{"x": {"dtype": "F32", "shape": [4000000000, 4000000000], "data_offsets": [0, 16]}}', "is cut short or"),
        (b'{"' + b"y" * 90_000 + b'": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}', "to no module"),
    ],
)  # fmt: skip
def test_headers_that_are_nonsense(model: Path, adapter: Path, header: bytes, reason: str) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(AdapterError, match=reason) as raised:
        read(model, adapter)
    assert len(str(raised.value)) < 1100


def test_what_is_done_to_the_file_after_it_was_read_changes_nothing(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated in place, right after it was read: through a mapping that would be SIGBUS."""
    expected = read(model, adapter)
    real = FileInMemory.entries

    def truncate(stored: FileInMemory) -> Any:
        with stored.file.open("r+b") as stream:
            stream.truncate(10)
        return real(stored)

    monkeypatch.setattr(FileInMemory, "entries", truncate)
    found = read(model, adapter)
    assert found.digest == expected.digest
    assert all(torch.equal(found.modules[name].b, each.b) for name, each in expected.modules.items())
    with pytest.raises(AdapterError, match="not a safetensors file"):
        read(model, adapter)


def test_a_file_that_is_too_large_or_shrinks_while_it_is_read(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = adapter / "adapter_model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_mode=0o100644, st_size=file.stat().st_size + 8))
        with pytest.raises(AdapterError, match=r"was cut short while it was read, to (\d+) of"):
            read(model, adapter)
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(AdapterError, match="has 1099511627776 bytes, must be at most"):
        read(model, adapter)


def test_scales_and_ranks_of_patterns(model: Path, adapter: Path) -> None:
    change_config(
        adapter, alpha_pattern={"layers.1.self_attn.q_proj": 2}, rank_pattern={"embed_tokens": 16}, use_rslora=True
    )
    config = read_lora_config(adapter)
    assert config.scale_of("layers.0.self_attn.q_proj") == 8 / 2
    assert config.scale_of("layers.1.self_attn.q_proj") == 2 / 2
    assert config.scale_of("layers.11.self_attn.q_proj") == 8 / 2
    assert (config.rank_of("embed_tokens"), config.scale_of("embed_tokens")) == (16, 2.0)


def test_the_digest_is_the_contents(model: Path, adapter: Path, tmp_path: Path) -> None:
    digest = read(model, adapter).digest
    again = make_adapter(model, tmp_path / "again", targets=("q_proj", "embed_tokens"))
    assert read(model, again).digest == digest
    change_config(again, lora_alpha=9)
    assert read(model, again).digest != digest
    other = make_adapter(model, tmp_path / "other", targets=("q_proj", "embed_tokens"), seed=1)
    assert read(model, other).digest != digest


def test_names_limits_and_paths_of_the_store(model: Path, adapter: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = make_adapter(model, root / "a", targets=("q_proj",))
    make_adapter(model, root / "b", targets=("q_proj",))
    (root / "out").symlink_to(adapter)
    make_adapter(model, root / "linked", targets=("q_proj",))
    (root / "linked" / "adapter_model.safetensors").unlink()
    (root / "linked" / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    limits: dict[str, Any] = {"max_rank": 16, "max_adapters": 1, "reserved": frozenset({"base"})}
    now = [0.0]
    store = AdapterStore(load_model_config(model), MODULES, root=root, clock=lambda: now[0], **limits)
    for path in ("../adapter", str(adapter), "out", "linked", "a/../../adapter"):
        with pytest.raises(AdapterError, match="leads outside"):
            store.load("x", Path(path), 1)
    with pytest.raises(AdapterError, match="no directory"):
        store.load("x", Path("nowhere"), 1)
    with pytest.raises(AdapterError, match=r"path .*null"):
        store.load("x", Path("a\0b"), 1)
    with pytest.raises(AdapterError, match="is the base model's"):
        store.load("base", Path("a"), 1)
    with pytest.raises(AdapterError, match="characters"):
        store.load("", Path("a"), 1)
    loaded = store.load("x", Path("a"), 1)
    assert (loaded.path, loaded.rank, loaded.id.generation) == (str(inside), 4, 1)
    assert store.load("x", Path("a"), 1) is loaded
    with pytest.raises(AdapterLimit, match=r"1 adapters are loaded, the limit \(max_cpu_loras\) is 1"):
        store.load("y", Path("b"), 1)
    assert store.load("x", Path("b"), 2).id.generation == 2
    assert store.find("x", loaded.id.digest, 1) == loaded.id
    store.unload("x")
    with pytest.raises(AdapterNotFound, match="'x' is not loaded; loaded are: none"):
        store.unload("x")
    assert store.find("x", loaded.id.digest, 2).generation == 2
    with pytest.raises(AdapterNotFound):
        store.find("x", loaded.id.digest, 1)  # there is a place for one
    now[0] = LINGER_SECONDS
    for generation in (1, 2, None):
        with pytest.raises(AdapterNotFound):
            store.find("x", loaded.id.digest, generation)
    closed = AdapterStore(load_model_config(model), MODULES, **limits)
    with pytest.raises(AdapterError, match="without lora_root"):
        closed.load("x", inside, 1)
    assert closed.load("x", inside, 1, below_root=False).id.name == "x"


def test_what_was_replaced_lingers_and_then_is_freed_without_another_load(model: Path, tmp_path: Path) -> None:
    make_adapter(model, tmp_path / "a", targets=("q_proj",))
    now = [0.0]
    limits: dict[str, Any] = {"max_rank": 16, "max_adapters": 3, "clock": lambda: now[0]}
    store = AdapterStore(load_model_config(model), MODULES, root=tmp_path, **limits)
    weights: list[Any] = []
    for generation in (1, 2, 3, 4):
        adapter: Any = store.load("x", Path("a"), generation).id.weights
        weights.append(weakref.ref(next(iter(adapter.modules.values())).b))
    del adapter
    assert [each.id.generation for each in store.retired()] == [2, 3], "three have a place"
    assert [each() is None for each in weights] == [True, False, False, False]
    now[0] = TAKE_BACK_SECONDS
    assert store.retired() == ()
    assert [each() is None for each in weights] == [True, True, True, False]


def test_a_load_can_be_taken_back_as_long_as_a_router_may_have_waited_for_another_worker(
    model: Path, tmp_path: Path
) -> None:
    make_adapter(model, tmp_path / "a", targets=("q_proj",))
    now = [0.0]
    limits: dict[str, Any] = {"max_rank": 16, "max_adapters": 3, "clock": lambda: now[0]}
    store = AdapterStore(load_model_config(model), MODULES, root=tmp_path, **limits)
    before = store.load("x", Path("a"), 1)
    store.load("x", Path("a"), 2)
    now[0] = LOAD_SECONDS + ACTION_SECONDS
    store.retired()
    taken = store.take_back("x", 2)
    assert taken is not None
    assert taken.id.generation == 2
    assert store.loaded() == (before,)
    store.take_back("y", 3)  # it is still being read
    now[0] += LOAD_SECONDS
    store.retired()
    with pytest.raises(AdapterOutdated, match="generation 3 of adapter 'y': was taken back"):
        store.load("y", Path("a"), 3)


def test_loads_that_come_late_or_with_another_content_change_nothing(model: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        make_adapter(model, tmp_path / name, targets=("q_proj",), seed=seed)
    store = AdapterStore(load_model_config(model), MODULES, root=tmp_path, max_rank=16, max_adapters=3)
    first = store.load("x", Path("a"), 5)
    for generation, path in ((4, "a"), (4, "b"), (5, "b")):
        with pytest.raises(AdapterOutdated, match=f"generation {generation} of adapter 'x': generation 5 was loaded"):
            store.load("x", Path(path), generation)
    with pytest.raises(AdapterOutdated, match=f"must be {first.id.digest.hex()[:16]}, as checked"):
        store.load("x", Path("b"), 6, digest=first.id.digest)
    assert store.loaded() == (first,)
    store.unload("x")
    with pytest.raises(AdapterOutdated, match="generation 5 of adapter 'x'"):
        store.load("x", Path("a"), 5)
    assert store.load("x", Path("a"), 6, digest=first.id.digest).id.generation == 6


def test_what_is_no_name_and_path() -> None:
    assert parse_lora_modules(("a=/x", "b=y=z")) == {"a": Path("/x"), "b": Path("y=z")}
    for entry in ("a", "=x", "a="):
        with pytest.raises(AdapterError, match="is not NAME=PATH"):
            parse_lora_modules((entry,))
    with pytest.raises(AdapterError, match="named twice"):
        parse_lora_modules(("a=x", "a=y"))

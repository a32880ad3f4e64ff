"""Configuration: precedence of its sources, limits, messages, and the TOML that is printed and read back."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pagewire.config import ConfigError, RouterConfig, WorkerConfig, load_config, to_toml, with_model

MODEL = {"model": "m"}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pagewire.toml"
    path.write_text(text)
    return path


def test_defaults_of_the_contract() -> None:
    worker = load_config(WorkerConfig, {"role": "decode", **MODEL}, None, {})
    assert (worker.role, worker.host, worker.port, worker.kv_transfer) == ("decode", "127.0.0.1", 0, "auto")
    assert (worker.engine.block_size, worker.engine.max_num_batched_tokens, worker.engine.max_num_seqs) == (16, 512, 64)
    assert worker.engine.enable_prefix_caching is True
    router = load_config(RouterConfig, MODEL, None, {})
    assert (router.port, router.policy, router.prefill_workers, router.migration_limit) == (50051, "prefix", (), 3)


def test_flags_beat_environment_beats_toml_beats_defaults(tmp_path: Path) -> None:
    toml = write(tmp_path, "model = 'toml'\nmax_num_seqs = 1\nblock_size = 2\nmax_num_batched_tokens = 3\n")
    environ = {"PAGEWIRE_MAX_NUM_SEQS": "11", "PAGEWIRE_BLOCK_SIZE": "12", "UNRELATED": "x"}
    config = load_config(WorkerConfig, {"role": "prefill", "max_num_seqs": "21", "port": None}, toml, environ)
    engine = config.engine
    assert (engine.max_num_seqs, engine.block_size, engine.max_num_batched_tokens) == (21, 12, 3)
    assert (engine.model, config.port, engine.cpu_threads) == ("toml", 0, 0)


def test_one_file_serves_all_roles(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        "model = 'm'\nlog_level = 'warning'\npolicy = 'load'\nmax_num_seqs = 5\n"
        "[router]\nport = 7000\n[decode]\nmax_num_seqs = 9\nlog_level = 'debug'\n",
    )
    router = load_config(RouterConfig, {"role": "router"}, toml, {})
    prefill = load_config(WorkerConfig, {"role": "prefill"}, toml, {})
    decode = load_config(WorkerConfig, {"role": "decode"}, toml, {})
    assert (router.port, router.policy, router.log_level) == (7000, "load", "warning")
    assert (prefill.engine.max_num_seqs, prefill.log_level, prefill.port) == (5, "warning", 0)
    assert (decode.engine.max_num_seqs, decode.log_level) == (9, "debug")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
    ],
)
def test_byte_counts(text: str, expected: int) -> None:
    config = load_config(WorkerConfig, {"role": "decode", **MODEL, "kv_cache_memory_bytes": text}, None, {})
    assert config.engine.kv_cache_memory_bytes == expected


def test_lists_and_switches_from_text() -> None:
    environ = {"PAGEWIRE_DECODE_WORKERS": "a:1, b:2", "PAGEWIRE_ENABLE_PREFIX_CACHING": "false"}
    assert load_config(RouterConfig, MODEL, None, environ).decode_workers == ("a:1", "b:2")
    assert not load_config(WorkerConfig, {"role": "decode", **MODEL}, None, environ).engine.enable_prefix_caching


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({}, {}, "--model is required (or PAGEWIRE_MODEL, or model in the config file)"),
        ({**MODEL, "port": "70000"}, {}, "port = '70000' (--port): input should be less than or equal to 65535"),
        (
            MODEL,
            {"PAGEWIRE_MAX_NUM_SEQS": "0"},
            "max_num_seqs = '0' (environment PAGEWIRE_MAX_NUM_SEQS): input should be greater than or equal to 1",
        ),
        ({**MODEL, "dtype": "f16"}, {}, "dtype = 'f16' (--dtype): input should be 'auto', 'float32' or 'bfloat16'"),
        ({**MODEL, "kv_cache_memory_bytes": "2XB"}, {}, "kv_cache_memory_bytes = '2XB' (--kv-cache-memory-bytes): "),
        (
            {**MODEL, "redis_url": "http://x"},
            {},
            "redis_url = 'http://x' (--redis-url): must be a URL with one of the schemes redis://, rediss://",
        ),
        ({**MODEL, "drain_timeout": "nan"}, {}, "drain_timeout = 'nan' (--drain-timeout): "),
        ({**MODEL, "tls_cert": "x"}, {}, "tls_cert and tls_key must be given together"),
        ({**MODEL, "port": "7", "kv_transfer_port": "7"}, {}, "kv_transfer_port = 7 must be another one than port"),
        ({**MODEL, "kv_max_hold_seconds": "3"}, {}, "kv_max_hold_seconds = 3 must be at least kv_lease_seconds = 30"),
        ({**MODEL, "worker_id": "a b"}, {}, "worker_id = 'a b' (--worker-id): "),
        ({**MODEL, "policy": "load"}, {}, "unknown option 'policy' for decode"),
    ],
)
def test_messages_name_field_source_value_and_limit(
    flags: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(WorkerConfig, {"role": "decode", **flags}, None, environ)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 'm'\nmax_num_sequences = 3", "unknown option 'max_num_sequences'"),
        ("model = 'm'\n[router]\nmax_num_seqs = 3", "unknown option 'max_num_seqs' in [router]"),
        ("model =", "is not TOML"),
        ("model = 'm'\nrouter = 3", "[router] must be a table"),
        ("model = 'm'\nport = 'x'", "port = 'x' ("),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RouterConfig, {"role": "router"}, write(tmp_path, text), {})
    assert message in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config file .*: No such file"):
        load_config(RouterConfig, MODEL, tmp_path / "none.toml", {})


def test_frozen() -> None:
    config = load_config(RouterConfig, MODEL, None, {})
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 3  # type: ignore[misc]


@pytest.mark.parametrize("role", ["router", "prefill"])
def test_printed_toml_reads_back(tmp_path: Path, role: str) -> None:
    cls: Any = RouterConfig if role == "router" else WorkerConfig
    flags = {
        "role": role,
        "model": 'a "quoted"\n模型 path',
        "redis_url": "redis://u:secret@h:1/0",
        "log_format": "json",
    }
    if role == "prefill":
        flags |= {"kv_offloading_size": "1.5", "kv_disk_size": "300MiB", "kv_disk_path": "/a b"}
        flags |= {"kv_store_url": "redis://:secret@h:1/1", "kv_store_size": "2"}
    config = load_config(cls, flags, None, {})
    assert "secret" not in to_toml(config)
    assert "redis://u:***@h:1/0" in to_toml(config)
    assert load_config(cls, {"role": role}, write(tmp_path, to_toml(config, show_secrets=True)), {}) == config


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:secret@h", "'http://u:***@h'"),
        ("http://:se:cr/et@@h:1/0", "'http://:***@h:1/0'"),
        ("http://secret@h", "'http://***@h'"),
        ("u:secret@h", "'u:***@h'"),
    ],
)
@pytest.mark.parametrize("option", ["redis_url", "kv_store_url"])
def test_no_error_shows_a_password(option: str, url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(WorkerConfig, {"role": "decode", **MODEL, option: url, "kv_store_size": "1"}, None, {})
    assert f"{option} = {shown} (--{option.replace('_', '-')}): must be" in str(caught.value)


def test_model_name_resolves_to_a_directory_and_becomes_the_served_name(tmp_path: Path) -> None:
    worker = with_model(
        load_config(WorkerConfig, {"role": "decode", "model": "org/name", "dtype": "float32"}, None, {}),
        lambda name, dtype: tmp_path / dtype,
    )
    assert (worker.engine.model, worker.engine.served_model_name) == (str(tmp_path / "float32"), "org/name")
    router = with_model(load_config(RouterConfig, {"model": str(tmp_path)}, None, {}), lambda name, dtype: tmp_path)
    assert (router.model, router.served_model_name) == (str(tmp_path), tmp_path.name)


def test_endpoint_that_a_worker_tells() -> None:
    def endpoint(**flags: str) -> str:
        return load_config(WorkerConfig, {"role": "decode", **MODEL, **flags}, None, {}).endpoint(123)

    assert endpoint() == "127.0.0.1:123"
    assert endpoint(advertise="node") == "node:123"
    assert endpoint(advertise="node:9") == "node:9"

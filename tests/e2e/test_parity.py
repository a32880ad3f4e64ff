"""The test that matters most: through router, prefill and decode == one process == Hugging Face, token for token."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import pytest

from engine.engine import Engine
from engine.transfer.nixl_load import is_installed
from pagewire import AsyncClient
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Greedy, clear_greedy
from tests.tiny_models import VOCAB_SIZE

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=0)

# (family, block size, tokens a step, transfer): chunks below and above a block, both block sizes, shared memory and
# sockets. The full product runs nightly; every plane and family by day in decode_svc/test_parity.py.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
SETUPS = [
    ("qwen3", 4, 3, "shm_ring"),
    ("llama", 16, 12, "auto"),
    ("gemma3", 16, 64, "tcp"),
]
ALL = product(FAMILIES, (4, 16), (3, 64), ("grpc", "tcp", "shm_vm", "shm_map", "shm_ring"))
NIXL = [("llama", 4, 64, "nixl")] if is_installed() else []
LATER = [
    ("mixtral", 16, 64, "grpc"),
    ("qwen3_moe", 4, 12, "shm_vm"),
    ("phi3", 16, 12, "auto"),
    ("gpt2", 16, 12, "grpc"),
    ("deepseek_v2", 16, 12, "shm_vm"),
    ("deepseek_v3", 4, 64, "grpc"),
]
NIGHTLY = [pytest.param(setup, marks=pytest.mark.nightly) for setup in (*ALL, *LATER, *NIXL) if setup not in SETUPS]


def kernel_set(block_size: int) -> Literal["auto", "reference"]:
    """Block size 16 is what users run, so it runs with the kernels they get; 4 with the oracle's."""
    return "auto" if block_size == 16 else "reference"


def lengths(block_size: int) -> list[int]:
    """1 … 4 blocks, each ± 1."""
    return sorted({1, *(k * block_size + d for k in (1, 2, 3, 4) for d in (-1, 0, 1))})


@pytest.fixture(scope="module", params=[*SETUPS, *NIGHTLY], ids=lambda s: "-".join(map(str, s)))
def setup(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    valkey_url: str,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, Path, int, list[Greedy]]]:
    family, block_size, chunk, plane = request.param
    model = tiny_model(family)
    oracle = [clear_greedy(model, n, NUM_TOKENS, vocab=VOCAB_SIZE) for n in lengths(block_size)]
    kernels = kernel_set(block_size)
    flags = ("--dtype", "float32", "--kernels", kernels, "--block-size", str(block_size), "--kv-transfer", plane,
             "--max-num-batched-tokens", str(chunk), "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(8 << 20),
             "--cpu-threads", "1")  # fmt: skip
    if plane == "shm_map":
        flags += ("--kv-pool-backing", "memfd")
    directory = tmp_path_factory.mktemp("system")
    with System.forked(zygote, model, directory, *flags, redis_url=valkey_url) as cluster:
        yield cluster, model, block_size, oracle


@pytest.fixture(autouse=True)
def quiet(setup: tuple[Cluster, Path, int, list[Greedy]]) -> Iterator[None]:
    yield
    setup[0].wait_quiet()


async def complete(client: AsyncClient, case: Greedy) -> tuple[list[int], int]:
    done = await client.complete(list(case.prompt), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return list(done.token_ids), done.usage.cached_tokens


def test_single_process_equals_hugging_face(setup: tuple[Cluster, Path, int, list[Greedy]]) -> None:
    _, model, block_size, oracle = setup
    engine = Engine(
        EngineOptions(
            model=str(model), dtype="float32", kernels=kernel_set(block_size), block_size=block_size,
            kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=32, cpu_threads=1,
        )
    )  # fmt: skip
    try:
        outputs = engine.generate([list(case.prompt) for case in oracle], GREEDY)
    finally:
        engine.close()
    for case, output in zip(oracle, outputs, strict=True):
        assert output[0] == list(case.output), f"prompt of {len(case.prompt)}"


async def test_cold_then_warm(setup: tuple[Cluster, Path, int, list[Greedy]]) -> None:
    cluster, _, block_size, oracle = setup
    cluster.reset_caches()
    async with AsyncClient(cluster.target) as client:
        for case in oracle:
            cold, cached = await complete(client, case)
            assert (cold, cached) == (list(case.output), 0), f"cold, prompt of {len(case.prompt)}"
            warm, cached = await complete(client, case)
            assert warm == list(case.output), f"warm, prompt of {len(case.prompt)}"
            assert cached == min(len(case.prompt) // block_size * block_size, len(case.prompt) - 1)


async def test_a_batch_of_mixed_lengths(setup: tuple[Cluster, Path, int, list[Greedy]]) -> None:
    cluster, _, _, oracle = setup
    cluster.reset_caches()
    async with AsyncClient(cluster.target) as client:
        results = await asyncio.gather(*(complete(client, case) for case in oracle * 2))
    for case, (output, _) in zip(oracle * 2, results, strict=True):
        assert output == list(case.output), f"prompt of {len(case.prompt)}"


async def test_decode_has_a_part_of_it(setup: tuple[Cluster, Path, int, list[Greedy]]) -> None:
    """D knows a prefix (from the first answer's own tokens), P only less: the pull starts behind D's blocks."""
    cluster, model, _, oracle = setup
    cluster.reset_caches()
    seed = oracle[-1]
    longer = clear_extension(model, seed)
    async with AsyncClient(cluster.target) as client:
        assert (await complete(client, seed))[0] == list(seed.output)
        assert (await complete(client, longer))[0] == list(longer.output)
        assert (await complete(client, longer))[0] == list(longer.output)


def clear_extension(model: Path, case: Greedy) -> Greedy:
    """The case's prompt and output as a new prompt: what a second chat turn sends."""
    from tests.e2e.oracle import MIN_MARGIN, greedy

    for extra in range(5, VOCAB_SIZE):
        found = greedy(model, [*case.prompt, *case.output, extra], NUM_TOKENS)
        if found.margin > MIN_MARGIN:
            return found
    raise AssertionError("no extension with the margin")

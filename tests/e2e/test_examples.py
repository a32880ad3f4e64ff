"""The README's ten-line examples run as shown: Python, Node straight from the protos, grpcurl by reflection."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(command: list[str], **extra: str) -> str:
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"} | extra
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def expected(cluster: Cluster) -> str:
    with cluster.client() as client:
        return client.complete("The capital of France is", max_tokens=16, temperature=0).text


def test_python(cluster: Cluster, expected: str) -> None:
    assert run([sys.executable, str(ROOT / "examples/python/generate.py"), cluster.target]) == expected + "\n"


def test_grpcurl(cluster: Cluster, expected: str) -> None:
    out = run(["sh", str(ROOT / "examples/grpcurl/generate.sh"), cluster.target])
    decoder, texts, rest = json.JSONDecoder(), [], out.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        texts.append(message.get("text", ""))
        rest = rest[end:].lstrip()
    assert "".join(texts) == expected


def check_modes(client: list[str], cluster: Cluster, expected: str) -> None:
    """A client of another language streams, cancels, runs out of time and reads an error's details."""
    command = [*client, cluster.target]
    assert run(command) == expected + "\n"

    def fails(mode: str) -> tuple[str, list[str]]:
        done = subprocess.run([*command, mode], capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout, done.stderr.splitlines()

    text, lines = fails("cancel")
    assert lines[0].startswith("CANCELLED: ")
    assert len(text) > 1, "it had begun"
    assert fails("deadline")[1][0].startswith("DEADLINE_EXCEEDED: ")
    _, lines = fails("error")
    assert lines[0].startswith("INVALID_ARGUMENT: sampling.temperature = -1.0: must be")
    assert lines[1].startswith("sampling.temperature: must be")


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_node(cluster: Cluster, expected: str, tmp_path: Path) -> None:
    for name in ("examples/node", "examples/cpp", "protos"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("node_modules"))
    example = tmp_path / "examples/node"
    run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(example)])
    check_modes(["node", str(example / "generate.js")], cluster, expected)


@cache
def _missing_for_cpp() -> list[str]:
    missing = [
        tool for tool in ("c++", "cmake", "protoc", "grpc_cpp_plugin", "pkg-config") if shutil.which(tool) is None
    ]
    if not missing and subprocess.run(["pkg-config", "--exists", "grpc++"], check=False).returncode:
        missing.append("libgrpc++-dev")
    return missing


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(_missing_for_cpp()), reason=f"{_missing_for_cpp()} not installed")
def test_cpp(cluster: Cluster, expected: str, tmp_path: Path) -> None:
    # Two sources a compilation share their headers; all of them in one would define protobuf's names twice.
    unity = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=2")
    run(["cmake", "-S", str(ROOT / "examples/cpp"), "-B", str(tmp_path), "-DCMAKE_CXX_FLAGS=-O0", *unity])
    build = ["cmake", "--build", str(tmp_path), "--parallel", "2"]
    subprocess.run(build, check=True, capture_output=True, timeout=500)
    check_modes([str(tmp_path / "pagewire_generate")], cluster, expected)


def test_grpcurl_lists_services_and_health(cluster: Cluster) -> None:
    services = run([str(BIN / "grpcurl"), "-plaintext", cluster.target, "list"]).split()
    assert {"pagewire.v1.InferenceService", "pagewire.v1.AdminService", "grpc.health.v1.Health"} <= set(services)
    for target in (cluster.target, *(w.endpoint for w in cluster.workers())):
        health = run([str(BIN / "grpcurl"), "-plaintext", target, "grpc.health.v1.Health/Check"])
        assert json.loads(health) == {"status": "SERVING"}

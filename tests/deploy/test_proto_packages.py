"""The stubs as packages of their own: built, installed without pagewire, used against a running system."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pagewire.router_stub import running_stub

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """
import sys, grpc, importlib.metadata
from pagewire.v1 import admin_pb2_grpc, decode_pb2, inference_pb2, inference_pb2_grpc
from pagewire.v1 import prefill_pb2, transfer_pb2, worker_pb2
assert sys.prefix in inference_pb2.__file__
installed = {d.name.lower() for d in importlib.metadata.distributions()}
assert "pagewire" not in installed and "numpy" not in installed, installed
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    print("".join(m.text for m in stub.Generate(inference_pb2.GenerateRequest(text="hello"), timeout=60)))
"""
NODE = """
const { InferenceService, AdminService, credentials } = require('pagewire-proto');
if (!AdminService) throw new Error('no AdminService');
const client = new InferenceService(process.argv[2], credentials.createInsecure());
const call = client.Generate({ text: 'hello' });
call.on('data', (message) => process.stdout.write(message.text));
call.on('end', () => { process.stdout.write('\\n'); client.close(); });
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=400, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_wheel_needs_grpcio_only(tmp_path: Path) -> None:
    run(sys.executable, ROOT / "scripts/build_proto_packages.py", tmp_path, cwd=tmp_path)
    (wheel,) = tmp_path.glob("pagewire_proto-*.whl")
    run(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    pip = (tmp_path / "venv/bin/pip", "install", "--quiet", "--no-compile")
    run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    (tmp_path / "client.py").write_text(PYTHON)
    with running_stub() as (target, _):
        assert run(tmp_path / "venv/bin/python", "client.py", target, cwd=tmp_path) == "hello\n"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_node_package(tmp_path: Path) -> None:
    run(sys.executable, ROOT / "scripts/build_proto_packages.py", tmp_path, "--node", cwd=tmp_path)
    (tarball,) = tmp_path.glob("pagewire-proto-*.tgz")
    app = tmp_path / "app"
    app.mkdir()
    run("npm", "install", "--no-audit", "--no-fund", "--prefix", app, tarball, cwd=app)
    (app / "client.js").write_text(NODE)
    with running_stub() as (target, _):
        assert run("node", "client.js", target, cwd=app) == "hello\n"

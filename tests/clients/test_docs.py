"""docs/clients.md: every snippet runs as it is printed, but for addresses and the model's name."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagewire import Client
from pagewire.v1 import types_pb2
from tests.clients.conftest import Served
from tests.clients.smg_gateway import SmgGateway

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PROMPT = "The capital of France is"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the code below it as (language, code)."""

    title: str
    blocks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.title


def sections() -> list[Section]:
    _, *parts = (ROOT / "docs" / "clients.md").read_text().split("\n## ")
    return [Section(part.split("\n", 1)[0], tuple(_BLOCK.findall(part))) for part in parts]


def commands(code: str) -> str:
    """A console block without its prompts."""
    return "\n".join(line.removeprefix("$ ") for line in code.splitlines())


@pytest.fixture(scope="module")
def addresses(client_cluster: Served) -> dict[str, str]:
    """What the page says -> what there is."""
    return {
        "127.0.0.1:50051": client_cluster.cluster.target,
        "127.0.0.1:50061": client_cluster.endpoint(types_pb2.WORKER_ROLE_PREFILL),
        "127.0.0.1:50062": client_cluster.endpoint(types_pb2.WORKER_ROLE_DECODE),
        "127.0.0.1:8000": f"127.0.0.1:{client_cluster.http_port}",
        "127.0.0.1:9091": f"127.0.0.1:{client_cluster.metrics_port('prefill')}",
        '"demo"': '"tiny"',
    }


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """What snippets may see of the repository; npm writes into it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    return tmp_path


def run(language: str, code: str, addresses: dict[str, str], workspace: Path) -> str:
    for printed, real in addresses.items():
        code = code.replace(printed, real)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", commands(code)]
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=workspace, env=env, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode()


def text_of(output: str) -> str:
    """What a snippet printed; of JSON messages their texts."""
    decoder, texts, rest = json.JSONDecoder(), [], output.strip()
    if not rest.startswith("{"):
        return output
    while rest:
        message, end = decoder.raw_decode(rest)
        texts.append(message["choices"][0]["text"] if "choices" in message else message.get("text", ""))
        rest = rest[end:].lstrip()
    return "".join(texts)


# `e2e/test_examples.py` builds the C++ client in every run.
_MARKS = {"C++": (pytest.mark.nightly, pytest.mark.timeout(600))}
# Without these a section cannot run.
_TOOLS = {"Node": ("npm",), "C++": ("cmake", "grpc_cpp_plugin", "c++")}


@pytest.mark.parametrize(
    "section", [pytest.param(each, marks=_MARKS.get(each.title, ())) for each in sections()], ids=str
)
def test_snippets(section: Section, served: Served, addresses: dict[str, str], workspace: Path) -> None:
    for name in _TOOLS.get(section.title, ()):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    with served.cluster.client() as client, ExitStack() as stack:
        wanted = {readable(answer(client, special)) for special in (True, False)}
        assert len(min(wanted, key=len)) >= 5
        is_run = False
        for language, code in section.blocks:
            if commands(code).startswith("smg launch"):
                gateway = stack.enter_context(SmgGateway(*smg_arguments(code, addresses)))
                addresses = {**addresses, "http://127.0.0.1:30000": gateway.url}
                continue
            output = run(language, code, addresses, workspace)
            if section.title == "llm-d's endpoint picker":
                assert len(output.splitlines()) == 5, output
            else:
                assert readable(text_of(output)) in wanted, output
            is_run = True
        assert is_run, "a section without a snippet"


def readable(text: str) -> str:
    """What all clients agree about: not on what becomes of broken UTF-8, nor on the last newline of the output."""
    return text.replace("\ufffd", "").strip()


def answer(client: Client, special: bool) -> str:
    """Greedy, with the model's special tokens before the prompt or without."""
    return client.complete(client.tokenize(PROMPT, add_special_tokens=special), temperature=0, max_tokens=16).text


def smg_arguments(code: str, addresses: dict[str, str]) -> list[str]:
    """The printed ones but for host and port, which are the fixture's."""
    words = commands(code).replace("\\\n", " ").split()[2:]
    kept = words[: words.index("--host")]
    for printed, real in addresses.items():
        kept = [word.replace(printed, real) for word in kept]
    assert words[len(kept) :] == ["--host", "127.0.0.1", "--port", "30000"]
    return kept

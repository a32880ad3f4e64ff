"""The command line: output, exit codes and one-line messages of each command, run as a user runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire import __version__
from pagewire.cli import main
from pagewire.security import Security
from tests.pagewire.router_stub import StubRouter, running_stub

ROOT = Path(__file__).resolve().parents[2]


def pagewire(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_")}
    return subprocess.run(
        [sys.executable, "-m", "pagewire", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
        env={**environment, "COLUMNS": "120", "NO_COLOR": "1", **environ},
    )  # fmt: skip


def one_line_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The message of a failed command, after checking that it is all there is on stderr."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def stub() -> Iterator[tuple[str, StubRouter]]:
    with running_stub() as running:
        yield running


@pytest.fixture
def target(stub: tuple[str, StubRouter]) -> str:
    return stub[0]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert pagewire("--version").stdout == f"pagewire {__version__}\n"
    done = pagewire("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: pagewire" in done.stdout
    for command in COMMANDS:  # in this process: each of its own takes half a second of CPU
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        said = capsys.readouterr()
        assert (end.value.code, said.err) == (0, "")
        assert "Usage: pagewire" in said.out


COMMANDS = ("up", "router", "prefill", "decode", "generate", "chat", "convert", "status", "explain-route", "adapter")


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "router"])
def test_help_groups_options_and_shows_limits_and_defaults(command: str) -> None:
    text = " ".join(pagewire(command, "--help", COLUMNS="250").stdout.split())
    assert "Network" in text
    assert "Security" in text
    assert "over 0, at most 86400 [default: 30.0]" in text
    assert "0 … 65535 [default: off]" in text
    if command != "router":
        assert "--max-num-batched-tokens" in text
        assert "1 … 1048576 [default: 512]" in text
        assert "--no-enable-prefix-caching" in text
        assert "Keep KV blocks for reuse. [default: on]" in text


def test_importing_the_cli_is_light() -> None:
    program = (
        "import sys; from pagewire.cli.app import build_app; build_app([]); "
        "heavy = {'torch', 'transformers', 'grpc', 'numpy', 'tokenizers', "
        "'huggingface_hub', 'redis', 'prometheus_client'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_command_brings_no_other_commands_options() -> None:
    program = (
        "import sys; from pagewire.cli.app import build_app; app = build_app(['router', '--help']); "
        "print([each.name for each in app.registered_commands], 'pagewire.cli.bench' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "['router'] False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'. (see 'pagewire --help')"),
        (["generate"], "Missing argument 'PROMPT'. (see 'pagewire generate --help')"),
        (["generate", "x", "--foo"], "No such option: --foo (see 'pagewire generate --help')"),
        (["generate", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["up", "--model", "x", "--decode", "0"], "Invalid value for '--decode'"),
        (["up"], "--model is required (or PAGEWIRE_MODEL, or model in the config file)"),
        (["prefill", "--model", "/nope"], "model = '/nope': no such directory, and neither 'demo' nor a hub name"),
        (["decode", "--model", "x", "--block-size", "0"], "block_size = '0' (--block-size): "),
        (["router", "--model", "x", "--config", "/nope.toml"], "cannot read config file /nope.toml: No such file"),
        (["router", "--model", "x", "--tls-cert", "/c"], "tls_cert and tls_key must be given together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    assert one_line_error(pagewire(*arguments), 2).startswith(message)


def test_print_config_obeys_precedence(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text("max_num_seqs = 1\nblock_size = 2\nmax_num_batched_tokens = 3\n")
    done = pagewire("decode", "--model", "m", "--config", str(toml), "--max-num-seqs", "21", "-tp", "2",
                    "--no-enable-prefix-caching", "--print-config", PAGEWIRE_MAX_NUM_SEQS="11",
                    PAGEWIRE_BLOCK_SIZE="12")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert {"max_num_seqs = 21", "tensor_parallel_size = 2", "block_size = 12", "max_num_batched_tokens = 3",
            'model = "m"', "enable_prefix_caching = false"} <= set(done.stdout.splitlines())  # fmt: skip


def test_generate_streams_text(target: str) -> None:
    done = pagewire("generate", "héllo 模型 🙂", "--target", target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "héllo 模型 🙂\n", "")


def test_generate_reads_stdin_chats_and_takes_its_target_from_the_environment(target: str) -> None:
    assert pagewire("generate", "-", stdin="from stdin", PAGEWIRE_TARGET=target).stdout == "from stdin\n"
    assert pagewire("generate", "hi", "--chat", "--target", target).stdout == "1:hi\n"
    assert pagewire("generate", "abc", "--n", "2", "--target", target).stdout == "[0] abc\n[1] abc\n"


def test_generate_json(target: str) -> None:
    done = pagewire("generate", "abc", "--json", "--max-tokens", "2", "--logprobs", "0", "--target", target)
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result == {
        "text": "ab",
        "token_ids": [97, 98],
        "finish_reason": "length",
        "stop_reason": "",
        "logprobs": [{"logprob": -0.5, "rank": 1, "top": []}] * 2,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 16},
        "timing": {"queue_ms": 0.5, "ttft_ms": 1.5, "total_ms": 2.5},
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "request_id": "r1",
        "seed": 7,
    }


def test_generate_passes_every_flag_on(stub: tuple[str, StubRouter]) -> None:
    target, router = stub
    done = pagewire("generate", "abc", "--target", target, "--max-tokens", "9", "--temperature", "0.5",
                    "--top-p", "0.25", "--top-k", "3", "--min-p", "0.125", "--seed", "42",
                    "--stop", "a b", "--stop", "c", "--model", "echo")  # fmt: skip
    assert done.returncode == 0, done.stderr
    request: Any = router.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.25)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (3, 0.125, 42)
    assert (list(request.text_options.stop), request.model) == (["a b", "c"], "echo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["!full"], "RESOURCE_EXHAUSTED: queue is full (3 of 3)"),
        (["!model"], "INVALID_ARGUMENT: text = '!model': must not start with '!'"),
        (["x", "--n", "65"], "INVALID_ARGUMENT: sampling.n = 65: must be in 1 … 64"),
        (["x", "--n", "-1"], "INVALID_ARGUMENT: sampling.n = -1: must be a whole number in 0 … 2**32-1"),
        (["x", "--temperature", "nan"], "INVALID_ARGUMENT: sampling.temperature = nan: must be finite and at least 0"),
        (["x", "--max-tokens", "0"], "INVALID_ARGUMENT: sampling.max_tokens = 0: must be at least 1"),
        (["!cut", "--json"], "INTERNAL: the stream ended before its last message"),
        (["!hang", "--json", "--timeout", "0.5"], "DEADLINE_EXCEEDED: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_generate_errors_are_one_line_and_exit_1(target: str, arguments: list[str], message: str) -> None:
    assert one_line_error(pagewire("generate", "--target", target, *arguments), 1).startswith(message)


def test_prompt_that_is_no_unicode(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagewire", "generate", b"a\xffb", "--target", target],
        capture_output=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.decode() == "error: INVALID_ARGUMENT: text: must be valid Unicode (it has lone surrogates)\n"


@pytest.mark.parametrize("command", [["generate", "x"], ["status"]])
def test_without_a_server_a_command_says_so_in_one_line(command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        assert one_line_error(pagewire(*command, "--target", target), 1).startswith("UNAVAILABLE: ")


def test_chat_over_a_pipe_remembers_the_conversation(target: str) -> None:
    done = pagewire("chat", "--target", target, "--system", "be brief", stdin="one\n\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2:one\n4:two\n", "")


def test_chat_over_a_pipe_ends_at_the_first_error(target: str) -> None:
    done = pagewire("chat", "--target", target, "--temperature", "-1", stdin="one\ntwo\n")
    assert one_line_error(done, 1).startswith("INVALID_ARGUMENT: sampling.temperature = -1.0")


def test_status_shows_the_workers(target: str) -> None:
    done = pagewire("status", "--target", target)
    assert done.returncode == 0, done.stderr
    assert "index connected with 12 blocks" in done.stdout
    for shown in ("decode-0", "alive", "127.0.0.1:9", "echo", "60/64"):
        assert shown in done.stdout


def test_token_file(tmp_path: Path) -> None:
    tokens = tmp_path / "token"
    tokens.write_text("secret\n")
    with running_stub(Security(tokens=("secret",))) as (target, _):
        assert pagewire("generate", "x", "--target", target, "--auth-token-file", str(tokens)).stdout == "x\n"
        assert pagewire("status", "--target", target, PAGEWIRE_AUTH_TOKEN_FILE=str(tokens)).returncode == 0
        message = one_line_error(pagewire("generate", "x", "--target", target), 1)
        assert message == "UNAUTHENTICATED: missing bearer token in 'authorization'"
    message = one_line_error(pagewire("generate", "x", "--auth-token-file", "/nope"), 2)
    assert message == "auth_token_file = '/nope': No such file or directory"


def test_ctrl_c_stops_an_answer_without_a_traceback(stub: tuple[str, StubRouter]) -> None:
    target, router = stub
    router.cancelled.clear()
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewire", "generate", "!hang", "--target", target],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(5) == "!hang"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert router.cancelled.wait(5)


def test_reader_that_leaves_early_is_no_traceback(target: str) -> None:
    text = "x" * 200
    command = f"{sys.executable} -m pagewire generate {text} --target {target} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("x", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "the directory has no config.json"),
        (lambda path: path.write_text("x"), "is not a directory"),
        (lambda path: None, "no such directory"),
    ],
)
def test_broken_model_directories(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "model"
    make(path)
    for command in ("up", "router", "prefill"):
        assert message in one_line_error(pagewire(command, "--model", str(path)), 2)


def test_broken_gguf_file_as_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    error = one_line_error(pagewire("up", "--model", str(path)), 1)
    assert error.startswith(f"model = '{path}': {path}: truncated or damaged GGUF file")


def test_convert_errors(tmp_path: Path) -> None:
    assert one_line_error(pagewire("convert", "/nope.gguf", str(tmp_path / "o")), 1) == "/nope.gguf: no such file"
    garbage = tmp_path / "m.gguf"
    garbage.write_bytes(b"not a gguf file")
    assert str(garbage) in one_line_error(pagewire("convert", str(garbage), str(tmp_path / "o")), 1)
    assert not (tmp_path / "o").exists()

"""What `--model` names becomes a directory; a router's of a GGUF file has no weights and needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tokenizer_digest import tokenizer_digest
from pagewire.cli.model import resolve_model
from router.model import ModelFacts
from tests.engine.gguf_files import write_gguf


def test_a_router_takes_config_and_tokenizer_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    _, file = write_gguf("llama", tmp_path, num_hidden_layers=1)
    code = "import sys; sys.modules[sys.argv[2]] = None\nfrom pagewire.cli.model import resolve_model\n"
    code += "print(resolve_model(sys.argv[1], weights=False))"
    run = [sys.executable, "-c", code, str(file)]
    found = Path(subprocess.run([*run, "torch"], check=True, capture_output=True, text=True).stdout.strip())
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(each.name for each in found.iterdir()) == names
    directory = resolve_model(str(file))
    assert directory != found
    ours, theirs = ModelFacts.load(found, "m"), ModelFacts.load(directory, "m")
    assert (ours.vocab_size, ours.max_model_len, ours.eos_token_ids) == (
        theirs.vocab_size,
        theirs.max_model_len,
        theirs.eos_token_ids,
    )
    assert tokenizer_digest(found) == tokenizer_digest(directory)
    failed = subprocess.run([*run, "gguf"], capture_output=True, text=True)
    assert "install 'pagewire[worker]'" in failed.stderr


def test_a_demo_model_that_is_there_needs_no_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` looks before it starts anything: torch and numpy would be a second that all its processes wait for."""
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    directory = tmp_path / "models" / "gemma-3-270m"
    directory.mkdir(parents=True)
    code = "import sys; from pagewire.cli.model import resolve_model; print(resolve_model('demo'))\n"
    code += "print(sorted({'torch', 'numpy', 'gguf', 'grpc', 'redis', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(directory), "[]"]


def test_a_demo_model_that_cannot_be_made_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    code = "import sys; sys.modules['gguf'] = None\nfrom pagewire.cli.model import resolve_model\nresolve_model('demo')"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "install 'pagewire[demo]'" in failed.stderr

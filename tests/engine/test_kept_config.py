"""The kept copy of a config says what transformers' own object says, and is made anew when anything has changed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.hf_config import read_hf_config
from engine.kept_config import KeptConfig, kept_config
from engine.model_config import load_model_config
from engine.models.registry import FAMILIES

Tiny = Callable[..., Path]


def forbidden() -> Any:
    raise AssertionError("read again")


def kept_file(cache: Path) -> Path:
    (file,) = (cache / "configs").iterdir()
    return file


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_it_has_what_transformers_says(tiny_model: Tiny, tmp_path: Path, family: str) -> None:
    directory = tiny_model(family)
    theirs = read_hf_config(directory)
    first = kept_config(directory / "config.json", lambda: theirs, cache_dir=tmp_path)
    again = kept_config(directory / "config.json", forbidden, cache_dir=tmp_path)
    assert isinstance(first, KeptConfig)
    assert vars(first) == vars(again)
    for name, value in theirs.to_dict().items():
        if name not in ("dtype", "transformers_version", "_name_or_path"):
            assert getattr(again, name) == json.loads(json.dumps(value)), name
    for other, name in type(theirs).attribute_map.items():
        assert getattr(again, other) == getattr(again, name)
    assert again.dtype == str(theirs.dtype)


def test_a_config_within_a_config(tiny_model: Tiny, tmp_path: Path) -> None:
    text = json.loads((tiny_model("gemma3") / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "dtype": "bfloat16"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**outer, "text_config": {**text, "model_type": "gemma3_text"}, "vision_config": {}}))
    first = kept_config(file, lambda: read_hf_config(tmp_path), cache_dir=tmp_path)
    again = kept_config(file, forbidden, cache_dir=tmp_path)
    assert (again.text_config.num_hidden_layers, again.text_config.model_type) == (4, "gemma3_text")
    assert again.text_config.rope_parameters == first.text_config.rope_parameters
    assert not hasattr(again.text_config, "nonsense")


def test_another_content_is_another_config(tiny_model: Tiny, tmp_path: Path) -> None:
    content = json.loads((tiny_model("llama") / "config.json").read_text())
    file = tmp_path / "config.json"
    for num_layers in (3, 2):
        file.write_text(json.dumps({**content, "num_hidden_layers": num_layers}))
        found = kept_config(file, lambda: read_hf_config(tmp_path), cache_dir=tmp_path)
        assert found.num_hidden_layers == num_layers
    assert len(list((tmp_path / "configs").iterdir())) == 2


@pytest.mark.parametrize("spoiled", ["", "{", "[]", "{}", '{"attributes": 1, "other_names": {}}'])
def test_a_spoiled_copy_is_made_anew(tiny_model: Tiny, tmp_path: Path, spoiled: str) -> None:
    directory = tiny_model("llama")
    kept_config(directory / "config.json", lambda: read_hf_config(directory), cache_dir=tmp_path)
    kept_file(tmp_path).write_text(spoiled)
    found = kept_config(directory / "config.json", lambda: read_hf_config(directory), cache_dir=tmp_path)
    assert found.num_hidden_layers == 3
    assert json.loads(kept_file(tmp_path).read_text())["attributes"]["num_hidden_layers"] == 3


def test_what_cannot_be_kept_is_returned_as_it_is(tiny_model: Tiny, tmp_path: Path) -> None:
    directory = tiny_model("llama")
    theirs = read_hf_config(directory)
    theirs.something = object()
    assert kept_config(directory / "config.json", lambda: theirs, cache_dir=tmp_path) is theirs
    assert list(tmp_path.iterdir()) == []


def test_errors_are_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "config.json").write_text('{"model_type": "nonsense", "architectures": ["X"]}')
        with pytest.raises(ModelError, match="nonsense"):
            load_model_config(tmp_path)


def test_a_second_start_does_without_transformers(tiny_model: Tiny, tmp_path: Path) -> None:
    directory = tiny_model("llama")
    code = "import sys; sys.modules['transformers'] = None\nfrom engine.model_config import load_model_config\n"
    code += "print(load_model_config(sys.argv[1]).num_layers)"
    run = [sys.executable, "-c", code, str(directory)]
    environment = {**os.environ, "PAGEWIRE_CACHE": str(tmp_path)}
    assert "transformers" in subprocess.run(run, capture_output=True, text=True, env=environment).stderr
    kept_config(directory / "config.json", lambda: read_hf_config(directory), cache_dir=tmp_path)
    done = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "3"


def test_a_config_whose_attributes_fail_is_returned_as_it_is(tiny_model: Tiny, tmp_path: Path) -> None:
    """Families that aren't served (Gemma 4, say) have such; what is to be told then is that they aren't."""
    directory = tiny_model("llama")
    theirs = read_hf_config(directory)
    theirs.to_dict = lambda: {"not_there": 1}
    assert kept_config(directory / "config.json", lambda: theirs, cache_dir=tmp_path) is theirs
    assert list(tmp_path.iterdir()) == []


def test_a_file_replaced_while_it_is_read_is_not_kept(tiny_model: Tiny, tmp_path: Path) -> None:
    """What was read is of the new content; kept under the old one's name, it would be some other model's for good."""
    content = json.loads((tiny_model("llama") / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))

    def replaced() -> Any:
        file.write_text(json.dumps({**content, "num_hidden_layers": 2}))
        return read_hf_config(tmp_path)

    assert kept_config(file, replaced, cache_dir=tmp_path).num_hidden_layers == 2
    file.write_text(json.dumps(content))
    found = kept_config(file, lambda: read_hf_config(tmp_path), cache_dir=tmp_path)
    assert found.num_hidden_layers == content["num_hidden_layers"]

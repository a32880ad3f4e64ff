"""What is sent: lengths, shared prefixes, seeds, and files with something wrong in them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.benchmark.datasets import Chat, Sample, check_lengths, make_samples
from pagewire.benchmark.options import ServeBenchOptions
from pagewire.config import ConfigError, options_from_flags

VOCABULARY = np.arange(10, 60)


def samples(seed: int = 0, **flags: object) -> list[Sample]:
    options = options_from_flags(ServeBenchOptions, flags)
    return make_samples(options, VOCABULARY, np.random.default_rng(seed))


def ids(sample: Sample) -> tuple[int, ...]:
    assert isinstance(sample.prompt, tuple)
    return sample.prompt


def test_random_lengths_and_ids() -> None:
    made = samples(num_prompts=200, input_len=20, random_output_len=10, random_range_ratio=0.25, random_prefix_len=3)
    assert {len(ids(each)) - 3 for each in made} == set(range(15, 26))
    assert {each.output_len for each in made} == set(range(7, 14))
    assert {token_id for each in made for token_id in ids(each)} <= set(range(10, 60))
    assert len({ids(each)[:3] for each in made}) == 1
    assert len({ids(each) for each in made}) == 200


def test_fixed_lengths_and_seeds() -> None:
    first, again, other = samples(1, num_prompts=3), samples(1, num_prompts=3), samples(2, num_prompts=3)
    assert [(len(ids(each)), each.output_len) for each in first] == [(1024, 128)] * 3
    assert first == again != other


def test_prefixes_repeat_equally() -> None:
    made = samples(
        dataset_name="prefix-repetition", num_prompts=20, prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=12, prefix_repetition_suffix_len=5, output_len=9,
    )  # fmt: skip
    assert list(Counter(ids(each)[:12] for each in made).values()) == [5] * 4
    assert len({ids(each)[12:] for each in made}) == 20
    assert {(len(ids(each)), each.output_len) for each in made} == {(17, 9)}
    with pytest.raises(ConfigError, match="num-prefixes = 4: must be at most num-prompts, 3"):
        samples(dataset_name="prefix_repetition", num_prompts=3, prefix_repetition_num_prefixes=4)


def write(path: Path, *items: object) -> Path:
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items) + "\n\n")
    return path


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": [1, 2], "output_tokens": 4}, {"prompt": "three"})
    asked: dict[str, Any] = {"dataset_name": "custom", "dataset_path": path, "output_len": 9}
    in_order = samples(num_prompts=5, disable_shuffle=True, **asked)
    assert in_order[:3] == [Sample("one", 9), Sample((1, 2), 4), Sample("three", 9)]
    assert in_order[3:] == in_order[:2]
    assert samples(num_prompts=5, disable_shuffle=True, no_oversample=True, **asked) == in_order[:3]
    assert samples(num_prompts=2, disable_shuffle=True, **asked) == in_order[:2]
    shuffled = {tuple(each.prompt for each in samples(seed, num_prompts=3, **asked)) for seed in range(20)}
    assert len(shuffled) == 6


def test_a_file_of_messages(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "a.jsonl", {"messages": talk}, {"prompt": "hi"})
    made = samples(dataset_name="custom", dataset_path=path, backend="openai-chat", num_prompts=2, disable_shuffle=True)
    assert [each.prompt for each in made] == [Chat(tuple(talk)), Chat(({"role": "user", "content": "hi"},))]


BAD_LINES: tuple[tuple[object, str], ...] = (
    ("{", "line 2: is no JSON"),
    ("[]", "line 2: must be an object"),
    ({"text": "a"}, 'line 2: must be an object with either "prompt" or "messages"'),
    ({"prompt": "a", "messages": []}, 'with either "prompt" or "messages"'),
    ({"prompt": [1, -1], "output_tokens": 1}, "line 2: prompt must be text or token ids"),
    ({"prompt": [True], "output_tokens": 1}, "line 2: prompt must be text or token ids"),
    ({"messages": [], "output_tokens": 1}, "need a -chat backend"),
    ({"prompt": "a", "output_tokens": 0}, "output_tokens = 0: must be a whole number from 1 on"),
    ({"prompt": "a"}, "output_tokens = -1: .* it is missing"),
)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    for line, said in BAD_LINES:
        path = write(tmp_path / "a.jsonl", {"prompt": "fine", "output_tokens": 1}, line)
        with pytest.raises(ConfigError, match=said):
            samples(dataset_name="custom", dataset_path=path, custom_output_len=-1)


def test_bad_messages_and_an_empty_file(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"dataset_name": "custom", "backend": "pagewire-chat"}
    for item in ({"messages": []}, {"messages": [{"role": "user"}]}, {"prompt": [1]}):
        with pytest.raises(ConfigError, match="line 1: must be messages"):
            samples(dataset_path=write(tmp_path / "a.jsonl", item), **asked)
    with pytest.raises(ConfigError, match="has no prompts"):
        samples(dataset_path=write(tmp_path / "b.jsonl"), **asked)


def test_too_long_is_said_before_the_run() -> None:
    made = [Sample((1,) * 20, 12), Sample("text", 10_000), Sample((1,) * 21, 12)]
    check_lengths(made[:2], 32)
    check_lengths(made, None)
    with pytest.raises(ConfigError, match=r"prompt 2 has 21 tokens and asks for 12 more, .* limit of 32"):
        check_lengths(made, 32)


BAD_OPTIONS: tuple[tuple[dict[str, object], str], ...] = (
    ({"dataset_name": "custom"}, "dataset-path goes with dataset-name custom"),
    ({"dataset_path": "a"}, "dataset-path goes with dataset-name custom"),
    ({"backend": "openai-chat"}, "takes messages"),
    ({"backend": "openai"}, "needs --tokenizer"),
    ({"port": 8000}, "--port is for the openai backends"),
    ({"request_rate": "0"}, r"request_rate = '0' \(--request-rate\)"),
    ({"percentile_metrics": "ttft,tpxt"}, r"percentile_metrics = 'tpxt'"),
    ({"metric_percentiles": "101"}, r"metric_percentiles = '101'"),
    ({"random_range_ratio": "1"}, "random_range_ratio"),
    ({"max_concurrency": "0"}, "max_concurrency"),
    ({"ramp_up_strategy": "linear", "ramp_up_start_rps": "1"}, "needs ramp-up-start-rps and ramp-up-end-rps"),
    ({"ramp_up_end_rps": "1"}, "go with ramp-up-strategy"),
    ({"ramp_up_strategy": "slow"}, "ramp_up_strategy"),
    (
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": "1", "ramp_up_end_rps": "2", "request_rate": "3"},
        "request-rate = 3: ramp-up-strategy sets the rate",
    ),
)


def test_options_that_cannot_be() -> None:
    for flags, said in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=said):
            options_from_flags(ServeBenchOptions, flags)


@pytest.mark.parametrize("name", ["prefix-repetition", "custom"])
def test_an_input_length_that_would_not_be_used_is_refused(name: str) -> None:
    path = {"dataset_path": __file__} if name == "custom" else {}
    with pytest.raises(ConfigError, match="input-len = 7: is for dataset random; "):
        options_from_flags(ServeBenchOptions, {"dataset_name": name, "input_len": 7, **path})

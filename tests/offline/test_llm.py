"""LLM on an engine in this process: the reference's tokens, the router's text and errors, and nothing left behind."""

import gc
import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from rich.console import Console

from pagewire import LLM, SamplingParams, StructuredOutput
from pagewire.config import ConfigError
from pagewire.errors import InvalidArgument, NotFound
from pagewire.text.tokenizer import Tokenizer
from pagewire.token_progress import token_progress
from tests.engine.gguf_files import write_gguf
from tests.offline.models import TinyModel, reference_engine, tiny_llm
from tests.tiny_adapters import make_adapter, merge

PROMPTS = [[(31 * i + 7 * j) % 290 + 5 for j in range(n)] for i, n in enumerate((1, 3, 8, 16, 21, 40))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def test_tokens_are_the_engines(tiny_model: TinyModel) -> None:
    """More prompts than fit into a step, each with parameters of its own; warm the second time."""
    model = tiny_model("llama")
    params = [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=1),
        replace(GREEDY, temperature=0.7, top_k=20, seed=2**64 - 1),
        replace(GREEDY, temperature=1.3, top_p=0.9, seed=3, n=3),
        replace(GREEDY, temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, seed=5, logit_bias={17: 2.0}),
        replace(GREEDY, ignore_eos=False, stop_token_ids=[9]),
    ]
    with reference_engine(model) as engine:
        expected = engine.generate(PROMPTS, params)
    with tiny_llm(model) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params)
            assert [[choice.token_ids for choice in output.outputs] for output in outputs] == expected
            assert [output.prompt_token_ids for output in outputs] == PROMPTS
        assert outputs[5].num_cached_tokens == 39, "the second time all but the last token is cached"
    assert [choice.index for choice in outputs[3].outputs] == [0, 1, 2]
    assert all(output.finished and output.prompt is None for output in outputs)
    assert [output.request_id for output in outputs] == [str(number) for number in range(6, 12)]
    metrics = outputs[0].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert abs(time.time() - metrics.finished_time) < 600


def test_adapters_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    modules = f"style={make_adapter(model, tmp_path / 'style')}"
    with reference_engine(merge(model, tmp_path / "style", tmp_path / "merged")) as engine:
        expected = engine.generate(PROMPTS[:2], GREEDY)
    with tiny_llm(model, enable_lora=True, lora_modules=modules) as llm:
        outputs = llm.generate([*PROMPTS[:2], PROMPTS[0]], GREEDY, adapter=["style", "style", ""])
        assert [[each.token_ids for each in output.outputs] for output in outputs[:2]] == expected
        assert outputs[2].outputs[0].token_ids != expected[0][0]
        with pytest.raises(NotFound, match=r"known models: 'llama.*', 'style'"):
            llm.generate(PROMPTS[:1], GREEDY, adapter="law")


def test_text_stops_and_reasons(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with tiny_llm(model) as llm:
        (plain,) = llm.generate("the cat", replace(GREEDY, max_tokens=24))
        whole = plain.outputs[0]
        assert plain.prompt == "the cat"
        tokenizer = llm.get_tokenizer()
        assert plain.prompt_token_ids == tokenizer.encode("the cat")
        assert (whole.finish_reason, whole.stop_reason, len(whole.token_ids)) == ("length", None, 24)
        assert whole.logprobs is None
        assert whole.cumulative_logprob is None
        stop = next(whole.text[i : i + 3] for i in range(4, 20) if whole.text[i : i + 3].isascii())
        begin = whole.text.index(stop)
        (cut,) = llm.generate(["the cat"], replace(GREEDY, max_tokens=24, stop=[stop]))
        assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == (whole.text[:begin], "stop")
        assert cut.outputs[0].stop_reason == stop
        (kept,) = llm.generate(["the cat"], replace(GREEDY, max_tokens=24, stop=stop, include_stop_str_in_output=True))
        assert kept.outputs[0].text == whole.text[: begin + len(stop)]
        (by_id,) = llm.generate(["the cat"], replace(GREEDY, max_tokens=24, stop_token_ids=[whole.token_ids[5]]))
        end = whole.token_ids.index(whole.token_ids[5])
        assert by_id.outputs[0].token_ids == whole.token_ids[: end + 1]
        assert by_id.outputs[0].stop_reason == whole.token_ids[5]


def test_logprobs(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama")) as llm:
        (output,) = llm.generate([PROMPTS[2]], replace(GREEDY, temperature=1.0, seed=4, logprobs=2, max_tokens=8))
        choice = output.outputs[0]
        assert choice.logprobs is not None
        assert len(choice.logprobs) == 8
        tokenizer = llm.get_tokenizer()
        assert isinstance(tokenizer, Tokenizer)
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
            ranks = sorted(entry.rank or 0 for entry in position.values())
            assert ranks[:2] == [1, 2]
            assert len(position) == (2 if (position[token_id].rank or 0) <= 2 else 3)
            assert position[token_id].decoded_token == tokenizer.token_bytes(token_id).decode(errors="replace")
        total = sum(position[t].logprob for t, position in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)


def test_chat_is_the_template_and_then_text(tiny_model: TinyModel) -> None:
    hello = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    with tiny_llm(tiny_model("llama")) as llm:
        (one,) = llm.chat(hello, GREEDY)
        several = llm.chat([hello, parts, [*hello, {"role": "assistant", "content": "hi"}]], GREEDY)
        text = "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>assistant\n"
        assert one.prompt == text
        (same,) = llm.generate([one.prompt_token_ids], GREEDY)
        assert one.outputs == same.outputs == several[0].outputs == several[1].outputs
        assert several[2].prompt_token_ids != one.prompt_token_ids
        (bare,) = llm.chat(hello, GREEDY, add_generation_prompt=False)
        assert bare.prompt == text.removesuffix("<start_of_turn>assistant\n")
        with pytest.raises(InvalidArgument, match=r"conversations\[1\].*messages\[0\]\.role"):
            llm.chat([hello, [{"role": 3, "content": "x"}]], GREEDY)


def test_all_of_a_message_is_in_the_prompt(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message | tojson(sort_keys=true) }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a", "name": "me"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    with tiny_llm(model, max_model_len=512) as llm:
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1))
    assert output.prompt is not None
    assert [json.loads(line) for line in output.prompt.splitlines()] == messages


def test_prompt_logprobs(tiny_model: TinyModel) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    with tiny_llm(tiny_model("llama")) as llm:
        outputs = llm.generate(PROMPTS, params)
        (without,) = llm.generate([PROMPTS[2]], GREEDY)
        # What is drawn of a prompt's start, greedily, has rank 1 there.
        (start,) = llm.generate([PROMPTS[5][:20]], SamplingParams(max_tokens=1, temperature=0, logprobs=2))
    assert without.prompt_logprobs is None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        for token_id, position in zip(prompt[1:], others, strict=True):
            assert position is not None
            assert len(position) == (2 if (position[token_id].rank or 0) <= 2 else 3)
            assert sorted(entry.rank or 0 for entry in position.values())[:2] == [1, 2]
    (drawn,) = start.outputs
    assert drawn.logprobs is not None
    found = (outputs[5].prompt_logprobs or [])[20] or {}
    assert {token for token, entry in found.items() if entry.rank in (1, 2)} == drawn.logprobs[0].keys()


def test_what_generation_offers(tiny_model: TinyModel) -> None:
    drawn = replace(GREEDY, temperature=1.0, seed=3)
    with tiny_llm(tiny_model("llama")) as llm:

        def ids(params: SamplingParams, prompt: str | list[int] = "the cat") -> list[list[int]]:
            return [choice.token_ids for choice in llm.generate([prompt], params)[0].outputs]

        (plain,) = ids(drawn)
        allowed = replace(drawn, allowed_token_ids=[40, 41, 42])  # type: ignore[arg-type]
        assert set(ids(allowed)[0]) <= {40, 41, 42}
        tokenizer = llm.get_tokenizer()
        word = next(token for token in plain if tokenizer.encode(tokenizer.decode([token]))[1:] == [token])
        assert word not in ids(replace(drawn, bad_words=tokenizer.decode([word])))[0]
        structure = StructuredOutput("choice", choices=("cat", "hat"))
        (chosen,) = llm.generate("the", replace(drawn, ignore_eos=False, structured_output=structure))
        assert chosen.outputs[0].text in ("cat", "hat")
        four = ids(replace(drawn, n=4))
        two = ids(replace(drawn, n=2, best_of=4))
        assert len(two) == 2
        assert all(each in four for each in two)
        assert ids(replace(drawn, n=4, best_of=4)) == four
        (short,) = llm.generate([PROMPTS[5] * 10], replace(GREEDY, truncate_prompt_tokens=8))
        assert short.prompt_token_ids == PROMPTS[5][-8:]
        (full,) = llm.generate([PROMPTS[5] * 10], replace(GREEDY, truncate_prompt_tokens=-1))
        assert len(full.prompt_token_ids) == llm.max_model_len - 12
        with pytest.raises(InvalidArgument, match="best_of = 2: must be in n = 3"):
            ids(replace(drawn, n=3, best_of=2))


def test_prompts_in_all_shapes(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama")) as llm:
        ids = llm.get_tokenizer().encode("a b")
        shapes = ["a b", {"prompt": "a b"}, {"prompt_token_ids": ids}, {"prompt": "a b", "cache_salt": "s"}, ids]
        outputs = llm.generate(shapes, GREEDY)
        assert all(output.outputs == outputs[0].outputs for output in outputs)
        assert [output.prompt for output in outputs] == ["a b", "a b", None, "a b", None]
        assert llm.generate(ids, GREEDY)[0].outputs == outputs[0].outputs, "one prompt of token ids"
        assert llm.generate([], GREEDY) == []
        for bad, said in (
            (["a", 3.5], r"prompts\[1\]: must be a text"),
            ([[1, -2]], r"prompts\[0\]\[1\] = -2: must be a token id"),
            ([{"text": "x"}], r"prompts\[0\]\.text: is not supported"),
            ("", "text = '': must not be empty"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                llm.generate(bad, GREEDY)  # type: ignore[arg-type]


def test_a_bad_request_is_named_before_anything_runs(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama")) as llm:
        good: list[str | list[int]] = ["a"] * 3
        for params, said in (
            (SamplingParams(temperature=-1), r"prompts\[3\]: sampling.temperature = -1: must be"),
            (SamplingParams(max_tokens=255), r"prompts\[3\]: sampling.max_tokens = 255: must be at most 254"),
            (SamplingParams(stop=[""]), r"prompts\[3\]: text_options.stop\[0\]: has 0 characters"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                llm.generate([*good, "b"], [GREEDY] * 3 + [params])
        with pytest.raises(InvalidArgument, match=r"prompts\[3\].*300 tokens"):
            llm.generate([*good, [5] * 300], GREEDY)
        with pytest.raises(InvalidArgument, match="sampling_params = 2: must be one for each of the 3 prompts"):
            llm.generate(good, [GREEDY] * 2)
        engine = llm._session.backend._host.engine  # type: ignore[attr-defined]
        assert len(engine.kv_cache.cached_keys()) == 0, "nothing was computed"


def test_a_seed_makes_calls_repeatable(tiny_model: TinyModel) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=2)
    runs = []
    for seed in (7, 7, 8):
        with tiny_llm(tiny_model("llama"), seed=seed) as llm:
            runs.append([o.outputs for _ in range(2) for o in llm.generate([PROMPTS[1]] * 2, params)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1] != runs[0][2], "each request has its own"


def test_bad_arguments() -> None:
    for arguments, said in (
        ({}, "exactly one of the two"),
        ({"model": "m", "target": "t:1"}, "exactly one of the two"),
        ({"target": "t:1", "dtype": "float32"}, "dtype = 'float32': is an engine's option"),
        ({"model": "m", "token": "x"}, "token = 'x': is only for a target"),
        ({"model": "m", "seed": -1}, "seed = -1"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            LLM(**arguments)
    with pytest.raises(ConfigError, match=r"swap_space: no such option; known are .*block_size, "):
        LLM("m", swap_space=4)
    with pytest.raises(ConfigError, match="max_num_seqs = 0: input should be greater than or equal to 1"):
        LLM("m", max_num_seqs=0)
    with pytest.raises(ConfigError, match="no such directory"):
        LLM("/nowhere/at/all")


def test_close_gives_everything_back(tiny_model: TinyModel) -> None:
    """By `close`, and by forgetting the last reference. Threads are watched by conftest."""
    for forget in (False, True):
        llm = tiny_llm(tiny_model("llama"))
        llm.chat([[{"role": "user", "content": "hello"}]] * 3, GREEDY)
        engine = weakref.ref(llm._session.backend._host.engine)  # type: ignore[attr-defined]
        assert any(thread.name == "pagewire-engine" for thread in threading.enumerate())
        if not forget:
            llm.close()
            llm.close()
            with pytest.raises(RuntimeError, match="is closed"):
                llm.generate("x")
        del llm
        gc.collect()
        assert engine() is None
        assert not any(thread.name.startswith("pagewire") for thread in threading.enumerate())


def test_ctrl_c_ends_the_call_and_the_llm_stays_usable(tiny_model: TinyModel) -> None:
    long = replace(GREEDY, max_tokens=200)
    main = threading.main_thread().ident
    assert main is not None
    with tiny_llm(tiny_model("llama")) as llm:
        host = llm._session.backend._host  # type: ignore[attr-defined]
        kv_cache, generated = host.kv_cache, host._metrics.generation_tokens
        expected = llm.generate([PROMPTS[3]], GREEDY)[0].outputs

        def interrupt() -> None:
            deadline = time.monotonic() + 30
            while kv_cache.num_free == kv_cache.num_blocks and time.monotonic() < deadline:
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)

        killer = threading.Thread(target=interrupt)
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5 + i % 250, 7] for i in range(2000)], long)
        killer.join()
        before = generated._value.get()
        assert llm.generate([PROMPTS[3]], GREEDY)[0].outputs == expected
        assert generated._value.get() - before < 12 + 8 * 10, "what was interrupted went on"
        assert kv_cache.num_free == kv_cache.num_blocks, "no block is held by what was interrupted"


def test_two_threads_share_it(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama")) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
        results: list[object] = []

        def ask() -> None:
            results.append([output.outputs for output in llm.generate(PROMPTS, GREEDY)])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 3


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    _, file = write_gguf("llama", tmp_path, quantization=GGMLQuantizationType.Q8_0)
    with tiny_llm(file) as llm:
        first = llm.generate(PROMPTS, GREEDY)
    made = list((tmp_path / "cache" / "models").iterdir())
    assert len(made) == 1
    with tiny_llm(file) as llm:
        assert [o.outputs for o in llm.generate(PROMPTS, GREEDY)] == [o.outputs for o in first]
    assert list((tmp_path / "cache" / "models").iterdir()) == made


def test_progress_is_drawn_for_people() -> None:
    said = io.StringIO()
    with token_progress(2, shown=True, console=Console(file=said, force_terminal=True, width=100)) as progress:
        progress.tokens(5)
        progress.finished()
        progress.tokens(5)
        progress.finished()
    assert "2/2" in said.getvalue()
    assert "tokens/s" in said.getvalue()
    with token_progress(2, shown=False, console=Console(file=said)) as progress:
        before = said.getvalue()
        progress.tokens(5)
    assert said.getvalue() == before


def test_what_is_not_used_is_not_imported() -> None:
    code = (
        "import sys, pagewire; print(sorted({'torch', 'grpc', 'offline'} & set(sys.modules)));"
        "from pagewire import LLM, SamplingParams, RequestOutput; print(sorted({'torch', 'engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]

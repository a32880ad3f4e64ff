"""The same requests in one process and through a served system: one set of tokens, texts and answers."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from offline.outputs import Logprob
from pagewire import LLM, RequestOutput, SamplingParams, StructuredOutput
from pagewire.errors import InvalidArgument, PagewireError
from tests.e2e.cluster import Cluster
from tests.offline.models import OPTIONS as TINY
from tests.offline.models import reference_engine

OPTIONS = {**TINY, "kernels": "reference"}
PROMPTS: list[Any] = ["hello there", "the cat and the hat", [5 + (7 * n) % 290 for n in range(40)]]
CHAT = [[{"role": "user", "content": "hello"}], [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=16, temperature=0.8, top_k=40, seed=11),
    "choices": SamplingParams(max_tokens=12, n=3, seed=5, stop=["e", "the"], min_tokens=2),
    "logprobs": SamplingParams(max_tokens=8, temperature=1.0, seed=2, logprobs=2),
    "prompt logprobs": SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2),
    "constrained": SamplingParams(max_tokens=8, seed=3, bad_words=["e", "the"], truncate_prompt_tokens=3),
    "structured": SamplingParams(
        max_tokens=8, n=2, best_of=3, seed=4, structured_output=StructuredOutput("regex", "[a-z]+")
    ),
    "stop ids": SamplingParams(
        max_tokens=24, seed=9, stop_token_ids=list(range(5, 80)), include_stop_str_in_output=True
    ),
}


def entries(position: Mapping[int, Logprob]) -> dict[int, Any]:
    return {
        token: (pytest.approx(entry.logprob, abs=1e-5), entry.rank, entry.decoded_token)
        for token, entry in position.items()
    }


def plain(outputs: list[RequestOutput]) -> list[Any]:
    """All but times, cache hits and names; log-probabilities as float32, which is how they travel."""
    return [
        (
            output.prompt,
            output.prompt_token_ids,
            [
                (
                    choice.index,
                    choice.text,
                    choice.token_ids,
                    choice.finish_reason,
                    choice.stop_reason,
                    choice.logprobs and [entries(position) for position in choice.logprobs],
                )
                for choice in output.outputs
            ],
            output.prompt_logprobs and [position and entries(position) for position in output.prompt_logprobs],
        )
        for output in outputs
    ]  # fmt: skip


def test_one_process_equals_the_served_system(cluster: Cluster, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    with LLM(model, **OPTIONS) as here, LLM(target=cluster.target, tokenizer=model) as there:
        for name, params in PARAMS.items():
            expected = here.generate(PROMPTS, params)
            assert plain(there.generate(PROMPTS, params)) == plain(expected), name
            assert plain(there.chat(CHAT, params)) == plain(here.chat(CHAT, params)), name
        ids = [output.prompt_token_ids for output in expected]
        kwargs: dict[str, Any] = {"add_generation_prompt": False, "chat_template_kwargs": {"bos_token": "<pad>"}}
        assert plain(there.chat(CHAT, PARAMS["greedy"], **kwargs)) == plain(here.chat(CHAT, PARAMS["greedy"], **kwargs))
        assert there.max_model_len == here.max_model_len == 256
        served = there.generate(PROMPTS, PARAMS["seeded"])
        local = here.generate(PROMPTS, PARAMS["seeded"])
    assert any(choice.finish_reason == "stop" for output in expected for choice in output.outputs)
    with reference_engine(model, kernels="reference") as engine:
        tokens = engine.generate(ids, SamplingParams(max_tokens=16, temperature=0.8, top_k=40, seed=11))
    assert (
        [[c.token_ids for c in o.outputs] for o in served]
        == tokens
        == [[c.token_ids for c in o.outputs] for o in local]
    )
    with cluster.client() as client:
        direct = client.complete(PROMPTS[0], max_tokens=16, temperature=0.8, top_k=40, seed=11)
    assert direct.text == local[0].outputs[0].text


def test_a_target_without_a_tokenizer_here(cluster: Cluster) -> None:
    with LLM(target=cluster.target, max_concurrent_requests=2) as llm:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode("the cat")
        assert tokenizer.decode(ids) == "the cat"
        outputs = llm.generate([ids] * 7, PARAMS["logprobs"])
        assert [output.request_id for output in outputs] == [str(n) for n in range(7)]
        assert all(plain([output]) == plain(outputs[:1]) for output in outputs)
        logprobs = outputs[0].outputs[0].logprobs
        assert logprobs is not None
        assert all(entry.decoded_token is None for entry in logprobs[0].values())
        with pytest.raises(InvalidArgument, match=r"prompts\[1\]: sampling.top_p = 2.0: must be in"):
            llm.generate(["a", "b"], [PARAMS["greedy"], SamplingParams(top_p=2.0)])
    with pytest.raises(PagewireError, match=r"127\.0\.0\.1:1"):
        LLM(target="127.0.0.1:1")


def test_a_batch_on_a_target(cluster: Cluster, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ["hello there", "the cat"], "max_tokens": 8, "temperature": 0}),
        ("/v1/completions", {"prompt": "hello", "logprobs": 2, "max_tokens": 4, "seed": 1}),
        ("/v1/chat/completions", {"messages": CHAT[0], "max_tokens": 8, "seed": 2, "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT[0], "logprobs": True, "max_tokens": 4, "seed": 1}),
        ("/v1/completions", {"prompt": "a", "top_p": 3.0}),
        ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}),
    ]  # fmt: skip
    lines = [
        {"custom_id": str(n), "url": url, "body": {"model": "tiny", **body}} for n, (url, body) in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))

    def run(*flags: str) -> dict[str, Any]:
        out.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-m", "pagewire", "run-batch", str(source), str(out), *flags],
                              capture_output=True, text=True, timeout=90, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        return {answer["custom_id"]: answer["response"] for answer in answers}

    def content(response: Any) -> Any:
        body = response["body"]
        return body.get("error") or [
            (choice.get("text"), choice.get("message"), choice["finish_reason"]) for choice in body["choices"]
        ]

    model = str(tiny_model("llama"))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    local = run("--model", model, "--served-model-name", "tiny", *flags)
    served = run("--target", cluster.target, "--tokenizer", model)
    assert {n: content(r) for n, r in served.items()} == {n: content(r) for n, r in local.items()}
    assert [served[str(n)]["status_code"] for n in range(6)] == [200, 200, 200, 200, 400, 200]
    for n in "135":
        one, other = (r[n]["body"]["choices"][0]["logprobs"] for r in (served, local))
        assert json.dumps(one)[:20] == json.dumps(other)[:20]
        assert one.keys() == other.keys()
    bare = run("--target", cluster.target)
    assert [bare[str(n)]["status_code"] for n in range(6)] == [200, 400, 200, 400, 400, 400]
    assert "give --tokenizer" in bare["1"]["body"]["error"]["message"]

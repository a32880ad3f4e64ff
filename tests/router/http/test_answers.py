"""What comes back: the order of a stream's events, both forms of log-probabilities, usage, echo, lists of prompts."""

from pathlib import Path

from tests.router.http.serving import CHAT, COMPLETIONS, a_server
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, wanted

HI = [{"role": "user", "content": "hi"}]


def latin(prompt: object, choice: int, index: int) -> int:
    """The ids of "Ī" (C4 AA, two tokens) over and over: text comes with every second token."""
    return (131, 106)[index % 2]


async def test_a_chat(tmp_path: Path) -> None:
    async with a_server(tmp_path, prefills=[ScriptedPrefill(script=Script(num_cached=4))]) as http:
        response = await http.post(CHAT, messages=HI, max_completion_tokens=3, request_id="mine", model="tiny")
        answer = response.json()
        asked = list(http.system.prefills[0].requests[-1].prompt_token_ids)
        text = http.text(wanted(3, prompt=asked))
    assert response.headers["x-request-id"] == answer["id"] == "chatcmpl-mine"
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["usage"] == {"prompt_tokens": len(asked), "completion_tokens": 3, "total_tokens": len(asked) + 3,
                               "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip


async def test_the_order_of_a_chat_stream(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        body = {"messages": HI, "max_tokens": 4, "n": 2, "stream_options": {"include_usage": True}}
        *chunks, usage, done = await http.events(CHAT, **body)
        whole = (await http.post(CHAT, messages=HI, max_tokens=4, n=2)).json()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in (*chunks, usage)} == {chunks[0]["id"]}
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for number, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == number]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in item["delta"] for item in mine[1:])
        assert "".join(item["delta"].get("content", "") for item in mine) == choice["message"]["content"]
        assert [item["finish_reason"] for item in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_a_stream_without_usage_has_none(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        *chunks, done = await http.events()
    assert done == "[DONE]"
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_logprobs_of_a_completion(tmp_path: Path) -> None:
    script = Script(tokens=latin)
    async with a_server(
        tmp_path, prefills=[ScriptedPrefill(script=script)], decodes=[ScriptedDecode(script=script)]
    ) as http:
        answer = await http.complete(logprobs=0, max_tokens=5)
        streamed = [event["choices"][0] for event in (await http.events(logprobs=0, max_tokens=5))[:-1]]
    (choice,) = answer["choices"]
    parts = ["bytes:\\xc4", "bytes:\\xaa"]
    assert choice["text"] == "ĪĪ\ufffd"
    assert choice["logprobs"]["tokens"] == [parts[index % 2] for index in range(5)]
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert choice["logprobs"]["top_logprobs"][0] == {"bytes:\\xc4": -1.0}
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in streamed for value in part["logprobs"][name]] == choice["logprobs"][name]
    assert "".join(part["text"] for part in streamed) == choice["text"]


async def test_logprobs_of_a_chat(tmp_path: Path) -> None:
    script = Script(tokens=latin, eos_at=2)
    async with a_server(
        tmp_path, prefills=[ScriptedPrefill(script=script)], decodes=[ScriptedDecode(script=script)]
    ) as http:
        (choice,) = (await http.post(CHAT, messages=HI, logprobs=True, max_tokens=9)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Ī", "stop")
    first, second, end = choice["logprobs"]["content"]
    assert first == {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC4], "top_logprobs": []}
    assert (second["bytes"], second["logprob"]) == ([0xAA], -2.0)
    assert (end["token"], bytes(end["bytes"])) == ("<eos>", b"<eos>")


async def test_prompts_of_all_forms(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        for prompt, num_prompts in (("ab", 1), ([5, 6], 1), (["ab", "cd"], 2), ([[5, 6], [7]], 2)):
            before = len(http.system.prefills[0].requests)
            answer = await http.complete(prompt=prompt, n=2, return_token_ids=True)
            asked = [list(r.prompt_token_ids) for r in http.system.prefills[0].requests[before:]]
            assert len(asked) == num_prompts
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
            for number, choice in enumerate(answer["choices"]):
                mine = choice["prompt_token_ids"]
                assert mine in asked
                assert choice["token_ids"] == wanted(4, prompt=mine, choice=number % 2)
            assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))
            assert answer["usage"]["completion_tokens"] == 8 * num_prompts
        assert asked == [[5, 6], [7]] or asked == [[7], [5, 6]]


async def test_a_stream_of_several_prompts(tmp_path: Path) -> None:
    prompts = [[5, 6], [7], list(PROMPT)]
    async with a_server(tmp_path) as http:
        *chunks, usage, done = await http.events(prompt=prompts, stream_options={"include_usage": True})
        texts = {number: http.text(wanted(4, prompt=prompt)) for number, prompt in enumerate(prompts)}
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 12
    found = dict.fromkeys(texts, "")
    for chunk in chunks:
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert found == texts


async def test_one_bad_prompt_fails_the_request(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        status, error = await http.error(prompt=[[5], [300]], max_tokens=3)
        assert (status, error["param"]) == (400, "prompt[0]")
        assert http.system.pipeline.num_active == 0


async def test_echo(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        plain = (await http.complete(prompt="ab"))["choices"][0]["text"]
        echoed = (await http.complete(prompt="ab", echo=True))["choices"][0]["text"]
        events = await http.events(prompt="ab", echo=True)
        tokens = (await http.complete(prompt=[40, 51], echo=True))["choices"][0]["text"]
        assert tokens == http.text([40, 51]) + http.text(wanted(4, prompt=[40, 51]))
    assert echoed == "ab" + plain
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == echoed


async def test_max_tokens_left_out(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        long = [5] * 120
        assert (await http.complete(max_tokens=None))["usage"]["completion_tokens"] == 16
        assert (await http.complete(max_tokens=None, prompt=long))["usage"]["completion_tokens"] == 8
        assert (await http.complete(max_tokens=None, min_tokens=20))["usage"]["completion_tokens"] == 20
        chat = (await http.post(CHAT, messages=HI)).json()["usage"]
    assert chat["total_tokens"] == 128


async def test_the_clients_own_request_id(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        named = await http.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == named.json()["id"] == "cmpl-mine"
        for name in (" ", "a b", "a\n", "é"):  # these would break, or forge, a header
            assert len((await http.complete(request_id=name))["id"]) == len("cmpl-") + 32


async def test_every_parameter_reaches_the_workers(tmp_path: Path) -> None:
    body = {"n": 2, "min_tokens": 1, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25,
            "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2, "seed": -1,
            "logit_bias": {"5": -100, "6": 1.5}, "stop_token_ids": [9], "ignore_eos": True, "logprobs": 3}  # fmt: skip
    async with a_server(tmp_path) as http:
        headers = {"x-tenant": "team", "traceparent": "00-1-2-03", "x-session-id": "chat 1"}
        response = await http.client.post(
            COMPLETIONS,
            json={"prompt": "ab", "cache_salt": "s", "priority": -3, "max_tokens": 2, **body},
            headers=headers,
        )
        assert response.status_code == 200, response.text
        request = http.system.prefills[0].requests[-1]
        assert http.system.placer.demands[-1].session_id == "chat 1"
        await http.post(COMPLETIONS, prompt="ab", top_k=-1, max_tokens=1, add_special_tokens=False)
        plain = http.system.prefills[0].requests[-1]
    sampling = request.sampling
    assert (request.cache_salt, request.priority, list(sampling.stop_token_ids)) == ("s", -3, [9])
    assert sampling.seed == 2**64 - 1
    assert dict(sampling.logit_bias) == {5: -100.0, 6: 1.5}
    for name in ("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "ignore_eos", "logprobs"):  # fmt: skip
        assert getattr(sampling, name) == body[name], name
    assert list(request.prompt_token_ids) == [1, *plain.prompt_token_ids]
    assert plain.sampling.top_k == 0


async def test_a_stop_text_ends_the_output_before_it_or_behind_it(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        text = http.text(wanted(4))
        for stop in (text[2], [text[2], "never"]):
            (choice,) = (await http.complete(stop=stop))["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:2], "stop", text[2])
        (choice,) = (await http.complete(stop=text[2], include_stop_str_in_output=True))["choices"]
        assert choice["text"] == text[:3]


async def test_content_in_parts_and_template_variables(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        history = [{"role": "system", "content": "s"}, {"role": "user", "content": parts},
                   {"role": "assistant", "content": None}, {"role": "user", "content": "c"}]  # fmt: skip
        await http.post(CHAT, messages=history, max_tokens=1, chat_template_kwargs={"bos_token": "!"})
        await http.post(CHAT, messages=HI, max_tokens=1, add_generation_prompt=False)
        decode = http.system.pipeline.model.tokenizer.decode
        first, second = (
            decode(list(request.prompt_token_ids), skip_special_tokens=False)
            for request in http.system.prefills[0].requests
        )
    assert first == "!<system>s\n<user>a\nb\n<assistant>\n<user>c\n<assistant>"
    assert second == "<bos><user>hi\n"


async def test_models_health_and_metrics(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        listed = (await http.client.get("/v1/models")).json()
        assert (await http.client.get("/v1/models/tiny")).json() == listed["data"][0]
        assert (await http.client.get("/health")).json() == {"status": "ok"}
        await http.complete()
        page = await http.client.get("/metrics")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert 'pagewire:rpc_requests_total{code="OK",method="POST /v1/completions"} 1.0' in page.text
    assert page.headers["content-type"].startswith("text/plain")

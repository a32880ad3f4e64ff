"""A request's life over workers that do as they should: hand-off, finishes, n > 1, stop strings, limits."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pagewire.errors import DeadlineExceeded, InvalidArgument, PagewireError, ResourceExhausted, Unavailable
from pagewire.text.tokenizer import Tokenizer
from router.backend import Started
from router.request import FinishReason, Piece, TextOptions, TextPrompt
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, System, a_call, a_system, collect, eventually, released, wanted


async def test_prefill_makes_the_first_token_and_decode_the_others(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(script=Script(num_cached=4, linger=0.1)), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        result = await system.generate(seed=7)
    assert result.token_ids == {0: wanted(8)}
    assert result.finish == {0: FinishReason.LENGTH}
    assert result.started.seed == 7
    assert (result.summary.prefill_worker, result.summary.decode_worker) == ("p0", "d0")
    assert (result.summary.prompt_tokens, result.summary.cached_tokens) == (len(PROMPT), 4)
    assert 0 < result.summary.queue_ms <= result.summary.ttft_ms <= result.summary.total_ms
    source = decode.sources[0]
    assert source is not None
    assert source.ticket in prefill.tickets
    assert (source.endpoint, source.incarnation) == (prefill.endpoint, prefill.incarnation)
    assert prefill.num_cancelled == 0, "the stream owns the blocks until the worker has ended it"
    assert released(prefill) == [False], "decode has used the ticket up by itself"
    attempts = {request.request_id for request in (*prefill.requests, *decode.requests)}
    assert len(attempts) == 2
    assert {request.sampling.seed for request in (*prefill.requests, *decode.requests)} == {7}


async def test_text_ids_and_logprobs_agree(tmp_path: Path) -> None:
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        result = await system.generate(logprobs=0)
        tokenizer = system.pipeline.model.tokenizer
        assert result.text[0] == tokenizer.decode(result.token_ids[0])
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in result.pieces)
    assert [item.logprob for piece in result.pieces for item in piece.logprobs] == [-1.0 - i for i in range(8)]


async def test_one_token_starts_nothing_on_decode(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        result = await system.generate(max_tokens=1, n=2)
    assert result.token_ids == {0: wanted(1), 1: wanted(1, choice=1)}
    assert set(result.finish.values()) == {FinishReason.LENGTH}
    assert decode.requests == []
    assert prefill.tickets == {}
    assert result.summary.decode_worker == ""


async def test_first_token_does_not_wait_for_decode(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.3))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate(max_tokens=2)
    assert result.pieces[0].token_ids == wanted(1)
    assert result.summary.ttft_ms < 250 < result.summary.total_ms


async def test_a_client_that_goes_before_the_ticket_is_seen_frees_it(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(script=Script(is_unheard=True)), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        call = asyncio.create_task(system.generate())
        await eventually(lambda: released(prefill) == [False])
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: released(prefill) == [True])


async def test_a_bug_before_the_prefill_ends_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("router.prefill_client.worker_request", broken)
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        with pytest.raises(PagewireError, match="ValueError") as error:
            await system.generate()
    assert error.value.code is grpc.StatusCode.INTERNAL


async def test_end_of_sequence_as_first_token(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(script=Script(eos_at=0)), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        result = await system.generate()
        await eventually(lambda: released(prefill) == [True])
    assert result.token_ids == {0: [2]}
    assert result.text == {0: ""}
    assert result.finish == {0: FinishReason.STOP}
    assert result.stop == {0: ""}
    assert decode.num_tokens_sent == 0


async def test_end_of_sequence_later(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(eos_at=3))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate()
        tokenizer = system.pipeline.model.tokenizer
    assert result.token_ids == {0: [*wanted(3), 2]}
    assert result.finish == {0: FinishReason.STOP}
    assert result.text[0] == tokenizer.decode(wanted(3))


async def test_several_choices(tmp_path: Path) -> None:
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        result = await system.generate(n=3, max_tokens=5)
    assert result.token_ids == {choice: wanted(5, choice=choice) for choice in range(3)}
    assert result.summary.completion_tokens == 15


async def test_without_prefill_workers_decode_does_it_all(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(num_cached=2))
    async with a_system(tmp_path, decodes=[decode]) as system:
        result = await system.generate(n=2)
    assert result.token_ids == {0: wanted(8), 1: wanted(8, choice=1)}
    assert decode.sources == [None]
    assert (result.summary.prefill_worker, result.summary.decode_worker) == ("d0", "d0")
    assert result.summary.cached_tokens == 2


async def test_without_decode_workers_nothing_runs(tmp_path: Path) -> None:
    prefill = ScriptedPrefill()
    async with a_system(tmp_path, prefills=[prefill]) as system:
        with pytest.raises(Unavailable, match="no decode worker") as caught:
            await system.generate()
        assert caught.value.retry_after_s > 0
    assert prefill.requests == []


async def test_stop_string_over_two_workers_ends_the_request(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(script=Script(delay=0.01))
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        tokenizer = system.pipeline.model.tokenizer
        letters = {char: tokenizer.token_id(char) or 0 for char in "xDEFGHIJ"}
        ids = [letters[char] for char in "xDEFGHIJxxxxxxxxxxxxxxxx"]
        prefill.script.tokens = decode.script.tokens = lambda prompt, choice, index: ids[index]
        options = TextOptions(stop=("DEFGHIJ",))
        result = await system.generate(a_call(text_options=options, max_tokens=20))
        kept = await system.generate(
            a_call(text_options=replace(options, include_stop_str_in_output=True), max_tokens=20)
        )
        await eventually(lambda: decode.num_running == 0)
    assert result.text == {0: "x"}
    assert result.token_ids == {0: ids[:8]}
    assert (result.finish[0], result.stop[0]) == (FinishReason.STOP, "DEFGHIJ")
    assert kept.text == {0: "xDEFGHIJ"}
    assert decode.num_cancelled == 2, "decode stops when the client has all it wanted"


async def test_stop_string_of_one_choice_lets_the_others_go_on(tmp_path: Path) -> None:
    decode = ScriptedDecode()
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        tokenizer = system.pipeline.model.tokenizer
        stop = tokenizer.decode(wanted(3)[2:])
        assert stop.strip("\ufffd")
        result = await system.generate(a_call(text_options=TextOptions(stop=(stop,)), n=2))
    assert len(result.token_ids[0]) == 3
    assert result.token_ids[1] == wanted(8, choice=1) or result.finish[1] is FinishReason.STOP


async def test_omitted_max_tokens_is_what_fits(tmp_path: Path) -> None:
    decode = ScriptedDecode(max_model_len=40)
    async with a_system(tmp_path, decodes=[decode]) as system:
        result = await system.generate(max_tokens=None)
    assert len(result.token_ids[0]) == 40 - len(PROMPT)
    assert decode.requests[0].sampling.max_tokens == 40 - len(PROMPT)


async def test_omitted_max_tokens_of_many_choices_is_what_the_pool_holds(tmp_path: Path) -> None:
    decode = ScriptedDecode()
    async with a_system(tmp_path, decodes=[decode]) as system:
        result = await system.generate(max_tokens=None, n=8)
    # 64 blocks of 4: one full prompt block is shared, 63 // 8 = 7 are each choice's own.
    assert {len(ids) for ids in result.token_ids.values()} == {(1 + 7) * 4 - len(PROMPT)}


@pytest.mark.parametrize(("length", "accepted"), [(38, True), (39, True), (40, False), (41, False)])
async def test_prompt_at_the_context_length(tmp_path: Path, length: int, accepted: bool) -> None:
    prompt = [9] * length
    async with a_system(tmp_path, decodes=[ScriptedDecode(max_model_len=40)]) as system:
        if accepted:
            result = await system.generate(prompt=prompt, max_tokens=40 - length)
            assert result.token_ids == {0: wanted(40 - length, prompt=prompt)}
            with pytest.raises(InvalidArgument, match=f"= {41 - length}: must be at most {40 - length}"):
                await system.generate(prompt=prompt, max_tokens=41 - length)
        else:
            with pytest.raises(InvalidArgument, match=f"has {length} tokens, at most 39 fit"):
                await system.generate(prompt=prompt, max_tokens=1)


async def test_seed_is_drawn_and_reported(tmp_path: Path) -> None:
    decode = ScriptedDecode()
    async with a_system(tmp_path, decodes=[decode]) as system:
        seeds = [(await system.generate()).started.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert [request.sampling.seed for request in decode.requests] == seeds


async def test_a_slow_reader_holds_up_nobody_and_gets_everything(tmp_path: Path) -> None:
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        slow = system.pipeline.generate(a_call(max_tokens=100))
        outputs = [await anext(slow), await anext(slow)]
        quick = await system.generate(max_tokens=100, prompt=[7, 8])
        assert quick.token_ids == {0: wanted(100, prompt=[7, 8])}
        await eventually(lambda: system.decodes[0].num_running == 0)
        result = collect([*outputs, *[output async for output in slow]])
    assert result.token_ids == {0: wanted(100)}
    assert len(result.pieces) <= 4, "what waited was merged"


async def test_a_client_that_leaves_during_prefill_frees_both_sides(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(script=Script(hang=True)), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        stream = system.pipeline.generate(a_call())
        assert isinstance(await anext(stream), Started)
        await eventually(lambda: decode.num_running == 1)
        await stream.aclose()
        await eventually(lambda: prefill.num_running == decode.num_running == 0)
    assert prefill.num_cancelled == decode.num_cancelled == 1
    assert released(prefill) == [True]


async def test_a_client_that_leaves_at_once_frees_what_was_begun(tmp_path: Path) -> None:
    """Its life was sent to the worker; the task that would see to its end never had a turn."""
    decode = ScriptedDecode(script=Script(delay=0.02))
    async with a_system(tmp_path, decodes=[decode]) as system:
        stream = system.pipeline.generate(a_call(max_tokens=90))
        assert isinstance(await anext(stream), Started)
        assert len(system.placer.demands) == 1, "placed before anything else had its turn"
        await stream.aclose()
        await eventually(lambda: decode.num_cancelled == 1 and decode.num_running == 0)


async def test_a_client_that_leaves_during_decode_frees_it(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.02))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        stream = system.pipeline.generate(a_call(max_tokens=90))
        async for output in stream:
            if isinstance(output, Piece) and output.index >= 2:
                break
        await stream.aclose()
        await eventually(lambda: decode.num_running == 0)
        assert decode.num_cancelled == 1
        assert (await system.generate(max_tokens=3)).token_ids == {0: wanted(3)}


async def test_request_timeout_keeps_what_was_streamed(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.05))
    outputs = []

    async def read(system: System) -> None:
        async for output in system.pipeline.generate(a_call(max_tokens=90)):
            outputs.append(output)

    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode], request_timeout=0.3) as system:
        with pytest.raises(
            PagewireError, match=r"did not end within its deadline \(its client's, or request_timeout = 0\.3 s\)"
        ) as caught:
            await read(system)
        assert caught.value.code.name == "DEADLINE_EXCEEDED"
        await eventually(lambda: decode.num_running == 0)
    assert len(outputs) > 2


async def test_workers_are_told_how_long_the_request_has(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode], request_timeout=50) as system:
        await system.generate()
        async for _ in system.pipeline.generate(a_call(), seconds_left=20):
            pass
    assert 45 < prefill.seconds_left[0] < 55
    assert 15 < prefill.seconds_left[1] < 25
    assert 45_000 < decode.requests[0].timeout_ms < 55_000
    assert 15_000 < decode.requests[1].timeout_ms < 25_000


async def test_workers_are_told_what_they_need_not_compute(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        await system.generate()
    assert [each.requests[0].num_expected_tokens for each in (prefill, decode)] == [len(PROMPT) - 1] * 2


async def test_too_many_requests_are_refused_with_a_retry_time(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.02))
    async with a_system(tmp_path, decodes=[decode], max_concurrent_requests=1) as system:
        first = system.pipeline.generate(a_call())
        await anext(first)
        with pytest.raises(ResourceExhausted, match="1 requests in flight, the limit is 1") as caught:
            await system.generate()
        assert caught.value.retry_after_s > 0
        await first.aclose()
        assert (await system.generate()).token_ids == {0: wanted(8)}


async def test_a_tenant_that_floods_keeps_others_not_out(tmp_path: Path) -> None:
    prefill = ScriptedPrefill(script=Script(hang=True))
    async with a_system(tmp_path, prefills=[prefill], decodes=[ScriptedDecode()], max_concurrent_requests=2) as system:

        async def ask(tenant: str) -> None:
            async for _ in system.pipeline.generate(replace(a_call(), tenant=tenant)):
                pass

        flood = [asyncio.create_task(ask("A")) for _ in range(2)]
        await eventually(lambda: prefill.num_running == 2)
        with pytest.raises(ResourceExhausted, match="2 requests in flight, the limit is 2; 2 are this tenant's"):
            await ask("A")
        other = asyncio.create_task(ask("B"))
        await eventually(lambda: prefill.num_running == 3)
        assert {each.tenant for each in prefill.requests} == {"A", "B"}
        with pytest.raises(ResourceExhausted):
            await ask("B")
        for task in (*flood, other):
            task.cancel()
        await asyncio.gather(*flood, other, return_exceptions=True)


async def test_draining_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    async with a_system(tmp_path, decodes=[ScriptedDecode(script=Script(delay=0.01))]) as system:
        running = asyncio.create_task(system.generate())
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(system.pipeline.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="draining"):
            await system.generate()
        assert (await running).token_ids == {0: wanted(8)}
        await draining


async def test_a_long_text_is_tokenized_in_a_thread(tmp_path: Path) -> None:
    async with a_system(tmp_path, decodes=[ScriptedDecode()]) as system:
        text = TextPrompt("the cat " * 5000)
        with pytest.raises(
            InvalidArgument, match=r"text: the prompt has at least \d+ tokens, at most 127 fit: the context length"
        ):
            await system.generate(replace(a_call(), prompt=text))
        assert (await system.pipeline.tokenize(text))[0] == 1


async def test_tokenizing_is_inside_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*_: object, **__: object) -> list[int]:
        go_on.wait(20)
        return [1]

    async with a_system(tmp_path, decodes=[ScriptedDecode()]) as system:
        monkeypatch.setattr(Tokenizer, "encode", slow)
        call = replace(a_call(), prompt=TextPrompt("the cat " * 50))
        try:
            with pytest.raises(DeadlineExceeded):
                async for _ in system.pipeline.generate(call, seconds_left=0.1):
                    pass
            assert system.pipeline.num_active == 0
        finally:
            go_on.set()


async def test_many_requests_share_one_session(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.001))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        prompts = [[number + 5, 9] for number in range(30)]
        results = await asyncio.gather(*(system.generate(prompt=prompt) for prompt in prompts))
    assert [result.token_ids[0] for result in results] == [wanted(8, prompt=prompt) for prompt in prompts]
    assert decode.num_sessions == 1

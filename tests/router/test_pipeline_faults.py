"""A request's life over workers that refuse, fail, break off, hang and come back."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pagewire.errors import ADAPTER_NOT_FOUND, NotFound, PagewireError, Unavailable
from router.backend import Output
from router.request import FinishReason, Piece, TextOptions
from router.services import RetryLimits
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import QUICK, Heard, a_call, a_system, eventually, released, wanted

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


# --- prefill ---


@pytest.mark.parametrize(
    "script", [Script(die_before_accept=True), Script(die_after_accept=True), Script(refuse=UNAVAILABLE)]
)
async def test_prefill_lost_before_the_first_token_goes_to_another(tmp_path: Path, script: Script) -> None:
    bad, good, decode = ScriptedPrefill("p0", script), ScriptedPrefill("p1"), ScriptedDecode()
    async with a_system(tmp_path, prefills=[bad, good], decodes=[decode]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert result.summary.prefill_worker == "p1"
    assert len(bad.requests) == len(good.requests) == 1
    assert bad.requests[0].request_id != good.requests[0].request_id


async def test_a_prefill_whose_stream_breaks_gives_its_ticket_back(tmp_path: Path) -> None:
    """It may have been done: then a lease owns the blocks, and nobody else would end it before its time."""
    bad, good = ScriptedPrefill("p0", Script(die_after_accept=True)), ScriptedPrefill("p1")
    async with a_system(tmp_path, prefills=[bad, good], decodes=[ScriptedDecode()]) as system:
        await system.generate()
        await eventually(lambda: released(bad) == [True])


async def test_prefill_workers_all_lost_leaves_it_to_decode(tmp_path: Path) -> None:
    bad = [ScriptedPrefill(f"p{number}", Script(die_after_accept=True)) for number in range(2)]
    async with a_system(tmp_path, prefills=bad, decodes=[ScriptedDecode()]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert result.summary.prefill_worker == "d0"


async def test_prefill_retries_are_bounded(tmp_path: Path) -> None:
    bad = [ScriptedPrefill(f"p{number}", Script(die_before_accept=True)) for number in range(5)]
    async with a_system(tmp_path, prefills=bad, decodes=[ScriptedDecode()]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert sum(len(prefill.requests) for prefill in bad) == QUICK.max_prefills


async def test_prefill_killed_while_it_computes(tmp_path: Path) -> None:
    bad, good, decode = ScriptedPrefill("p0", Script(hang=True)), ScriptedPrefill("p1"), ScriptedDecode()
    async with a_system(tmp_path, prefills=[bad, good], decodes=[decode]) as system:
        running = asyncio.create_task(system.generate())
        await eventually(lambda: decode.num_running == 1)
        await bad.kill()
        result = await running
    assert result.token_ids == {0: wanted(8)}
    assert result.summary.prefill_worker == "p1"


async def test_prefill_that_hangs_is_given_up_when_the_fleet_loses_it(tmp_path: Path) -> None:
    silent, decode = ScriptedPrefill("p0", Script(hang=True)), ScriptedDecode()
    async with a_system(tmp_path, prefills=[silent], decodes=[decode]) as system:
        running = asyncio.create_task(system.generate())
        await eventually(lambda: silent.num_running == 1)
        system.placer.lost.add("p0")
        result = await running
        await eventually(lambda: silent.num_running == 0)
    assert result.token_ids == {0: wanted(8)}
    assert result.summary.prefill_worker == "d0"


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
    ],
)
async def test_errors_about_the_request_are_passed_on(tmp_path: Path, code: grpc.StatusCode) -> None:
    bad, other, decode = ScriptedPrefill("p0", Script(refuse=code)), ScriptedPrefill("p1"), ScriptedDecode()
    async with a_system(tmp_path, prefills=[bad, other], decodes=[decode]) as system:
        with pytest.raises(PagewireError, match="no") as caught:
            await system.generate()
        assert caught.value.code is code
        assert other.requests == decode.requests == []
        bad.script = Script()
        assert (await system.generate()).token_ids == {0: wanted(8)}


async def test_an_adapter_that_a_worker_has_no_more_is_looked_for_elsewhere(tmp_path: Path) -> None:
    """On either side, and the prefill's ticket outlives a decode worker that refuses."""
    error = NotFound("adapter 'a' was loaded anew", reason=ADAPTER_NOT_FOUND)
    lacks = Script(refuse_with=error)
    prefills = [ScriptedPrefill("p0", lacks), ScriptedPrefill("p1")]
    decodes = [ScriptedDecode("d0", lacks), ScriptedDecode("d1")]
    async with a_system(tmp_path, prefills=prefills, decodes=decodes) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert (result.summary.prefill_worker, result.summary.decode_worker) == ("p1", "d1")
    assert len(prefills[1].requests) == 1, "prefilled twice"


async def test_full_prefill_workers_are_not_worked_around(tmp_path: Path) -> None:
    full = [ScriptedPrefill(f"p{n}", Script(refuse=grpc.StatusCode.RESOURCE_EXHAUSTED)) for n in range(2)]
    decode = ScriptedDecode()
    async with a_system(tmp_path, prefills=full, decodes=[decode]) as system:
        with pytest.raises(PagewireError, match="no") as caught:
            await system.generate()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [len(prefill.requests) for prefill in full] == [1, 1]
    assert decode.requests == []


# --- decode ---


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("how", ["break", "fail"])
async def test_decode_lost_in_mid_stream_goes_on_elsewhere(tmp_path: Path, after: int, how: str) -> None:
    script = Script(break_after=after) if how == "break" else Script(fail_after=after)
    prefill, bad, good = ScriptedPrefill(), ScriptedDecode("d0", script), ScriptedDecode("d1")
    heard = Heard(2 * (after + 1))
    script.heard = heard.event if after else None
    async with a_system(tmp_path, prefills=[prefill], decodes=[bad, good]) as system:
        result = await system.generate(n=2, logprobs=0, on_output=heard)
    assert result.token_ids == {choice: wanted(8, choice=choice) for choice in range(2)}
    assert [len(piece.logprobs) for piece in result.pieces] == [len(piece.token_ids) for piece in result.pieces]
    assert result.summary.decode_worker == "d1"
    taken_over = good.requests[0]
    if after == 0:
        assert good.sources[0] is not None
        assert good.sources[0].ticket in prefill.tickets, "nobody used the ticket up: the other one attaches"
        assert all(len(state.output_token_ids) <= 1 for state in taken_over.choices)
        assert len(prefill.requests) == 1
    else:
        assert len(prefill.requests) == 2, "prefill has the prompt's KV in its cache: decode pulls it"
        assert prefill.requests[1].choices == taken_over.choices
        assert good.sources[0] is not None
        outputs = {state.choice: list(state.output_token_ids) for state in taken_over.choices}
        assert outputs == {choice: wanted(after + 1, choice=choice) for choice in range(2)}
        assert not any(state.finished for state in taken_over.choices)
    assert [demand.numerics_class for demand in system.placer.demands] == ["", "n" if taken_over.choices else ""]
    assert taken_over.num_prompt_tokens == len(taken_over.prompt_token_ids)


async def test_decode_that_loses_the_pull_computes_the_same(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(loses_the_pull=True, delay=0.02))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate(n=2)
    assert result.token_ids == {choice: wanted(8, choice=choice) for choice in range(2)}
    assert len(decode.requests) == 1


@pytest.mark.parametrize("times", [1, 9])
async def test_kv_that_does_not_come_is_made_again_elsewhere(tmp_path: Path, times: int) -> None:
    """With kv-load-failure-policy fail: the decode worker is well and keeps the request, another one prefills."""
    prefills = [ScriptedPrefill(f"p{number}", Script(linger=0.1)) for number in range(2)]
    decodes = [ScriptedDecode("d0", Script(gives_back=times)), ScriptedDecode("d1")]
    async with a_system(tmp_path, prefills=prefills, decodes=decodes) as system:
        result = await system.generate()
        assert all(released(prefill) == [True] for prefill in prefills[:times])
    assert result.token_ids == {0: wanted(8)}
    assert result.summary.decode_worker == "d0"
    assert [len(prefill.requests) for prefill in prefills] == [1, 1]
    assert decodes[0].sources[-1] is None or times == 1


async def test_decode_that_computes_another_first_token_starts_over_from_the_facts(tmp_path: Path) -> None:
    """In another numerics class a first token may differ; the one that the client has counts."""
    decode = ScriptedDecode(script=Script(loses_the_pull=True, delay=0.05))
    decode.script.tokens = lambda prompt, choice, index: wanted(index + 1)[index] if index else 99
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert [list(state.output_token_ids) for state in decode.requests[1].choices] == [wanted(1)]


async def test_decode_killed_and_restarted_is_the_same_place(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.03))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        running = asyncio.create_task(system.generate(max_tokens=12))
        await eventually(lambda: decode.num_tokens_sent >= 3)
        system.placer.lost.add("d0")
        await decode.kill()
        await asyncio.sleep(0.1)
        await decode.restart()
        system.placer.lost.clear()
        result = await running
    assert result.token_ids == {0: wanted(12)}
    assert decode.num_sessions == 2


async def test_characters_and_stop_strings_survive_a_migration(tmp_path: Path) -> None:
    prefill, decodes = ScriptedPrefill(), [ScriptedDecode("d0", Script(break_after=2)), ScriptedDecode("d1")]
    async with a_system(tmp_path, prefills=[prefill], decodes=decodes) as system:
        tokenizer = system.pipeline.model.tokenizer
        # Each byte of 한 is a token, and so is each letter of STOP: the break falls into both.
        for text, expected_text in (("a한b한STOPxx", "a한b한"), ("aSTOPxxxxxxx", "a")):
            ids = tokenizer.encode(text, add_special_tokens=False)
            decodes[0].script.break_after = 2
            for worker in (prefill, *decodes):
                worker.script.tokens = lambda prompt, choice, index, ids=ids: ids[index]  # type: ignore[misc]
            call = a_call(text_options=TextOptions(stop=("STOP",)), max_tokens=len(ids))
            result = await system.generate(call)
            assert result.text == {0: expected_text}
            assert result.finish == {0: FinishReason.STOP}
            assert not any("\ufffd" in piece.text for piece in result.pieces)


async def test_a_finished_choice_stays_finished(tmp_path: Path) -> None:
    is_finished = asyncio.Event()

    def hear(output: Output) -> None:
        if isinstance(output, Piece) and output.finish_reason is not None:
            is_finished.set()

    script = Script(break_after=4, heard=is_finished)
    prefill, bad, good = ScriptedPrefill(), ScriptedDecode("d0", script), ScriptedDecode("d1")
    async with a_system(tmp_path, prefills=[prefill], decodes=[bad, good]) as system:
        tokenizer = system.pipeline.model.tokenizer
        letters = [tokenizer.token_id(char) or 0 for char in "abcdefgh"]
        other = tokenizer.token_id("z") or 0
        for worker in (prefill, bad, good):
            worker.script.tokens = lambda prompt, choice, index: letters[index] if choice else other
        result = await system.generate(a_call(n=2, text_options=TextOptions(stop=("c",))), on_output=hear)
    assert result.text == {0: "zzzzzzzz", 1: "ab"}
    assert [state.finished for state in good.requests[0].choices] == [False, True]


async def test_migrations_are_bounded(tmp_path: Path) -> None:
    decodes = [ScriptedDecode(f"d{number}", Script(fail_after=1)) for number in range(4)]
    limits = RetryLimits(max_migrations=2, avoid_seconds=0.05, wait_seconds=0.3)
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=decodes, retry_limits=limits) as system:
        with pytest.raises(Unavailable, match="moved 2 times and failed again: scripted failure") as caught:
            await system.generate()
    assert caught.value.retry_after_s > 0
    assert [len(decode.requests) for decode in decodes] == [1, 1, 1, 0]


async def test_the_only_decode_worker_gets_a_second_chance(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(break_after=2))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    assert decode.num_sessions == 2


async def test_no_decode_worker_comes_back(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.02))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        running = asyncio.create_task(system.generate(max_tokens=50))
        await eventually(lambda: decode.num_tokens_sent >= 2)
        system.placer.lost.add("d0")
        await decode.kill()
        with pytest.raises(Unavailable, match="no decode worker is alive; the last one failed"):
            await running


async def test_decode_refuses_the_request(tmp_path: Path) -> None:
    prefill = ScriptedPrefill(script=Script(delay=0.2))
    decode = ScriptedDecode(script=Script(refuse=grpc.StatusCode.INVALID_ARGUMENT, refuse_message="too long"))
    async with a_system(tmp_path, prefills=[prefill], decodes=[decode]) as system:
        with pytest.raises(PagewireError, match="too long") as caught:
            await system.generate()
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: released(prefill) == [True] and prefill.num_running == 0)


async def test_full_decode_worker_is_left_for_another(tmp_path: Path) -> None:
    full = ScriptedDecode("d0", Script(refuse=grpc.StatusCode.RESOURCE_EXHAUSTED))
    free = ScriptedDecode("d1")
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[full, free]) as system:
        assert (await system.generate()).token_ids == {0: wanted(8)}
        system.placer.lost.add("d1")
        with pytest.raises(PagewireError, match="no") as caught:
            await system.generate(prompt=[5])
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_void_ticket_is_not_the_end(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(fail_after=0, fail_code=grpc.StatusCode.NOT_FOUND))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        result = await system.generate()
    assert result.token_ids == {0: wanted(8)}
    first, second = decode.sources
    assert first is not None
    assert second is not None
    assert first.ticket != second.ticket


async def test_decode_that_hangs_is_given_up_when_the_fleet_loses_it(tmp_path: Path) -> None:
    silent, good = ScriptedDecode("d0", Script(delay=60)), ScriptedDecode("d1")
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[silent, good]) as system:
        running = asyncio.create_task(system.generate())
        await eventually(lambda: silent.num_running == 1)
        system.placer.lost.add("d0")
        assert (await running).token_ids == {0: wanted(8)}
        await eventually(lambda: silent.num_running == 0)


async def test_both_lost_at_once(tmp_path: Path) -> None:
    prefills = [ScriptedPrefill("p0", Script(hang=True)), ScriptedPrefill("p1")]
    decodes = [ScriptedDecode("d0"), ScriptedDecode("d1")]
    async with a_system(tmp_path, prefills=prefills, decodes=decodes) as system:
        running = asyncio.create_task(system.generate())
        await eventually(lambda: decodes[0].num_running == 1)
        system.placer.lost |= {"p0", "d0"}
        await asyncio.gather(prefills[0].kill(), decodes[0].kill())
        assert (await running).token_ids == {0: wanted(8)}


async def test_a_broken_session_fails_over_every_request_on_it(tmp_path: Path) -> None:
    bad, good = ScriptedDecode("d0", Script(delay=0.02)), ScriptedDecode("d1")
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[bad, good]) as system:
        prompts = [[number + 5] for number in range(8)]
        running = [asyncio.create_task(system.generate(prompt=prompt)) for prompt in prompts]
        await eventually(lambda: bad.num_running == 8)
        system.placer.lost.add("d0")
        await bad.kill()
        results = await asyncio.gather(*running)
    assert [result.token_ids[0] for result in results] == [wanted(8, prompt=prompt) for prompt in prompts]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_channel_that_is_closed_under_a_request_is_a_lost_worker(tmp_path: Path, role: str) -> None:
    prefills = [ScriptedPrefill("p0", Script(delay=0.2)), ScriptedPrefill("p1")]
    decodes = [ScriptedDecode("d0", Script(delay=0.05)), ScriptedDecode("d1")]
    async with a_system(tmp_path, prefills=prefills, decodes=decodes) as system:
        running = asyncio.create_task(system.generate())
        await eventually(lambda: decodes[0].num_running == 1)
        lost = prefills[0] if role == "prefill" else decodes[0]
        await system.placer.channel(lost.worker).close()
        assert (await running).token_ids == {0: wanted(8)}
        # The placer still hands out the closed channel: found unusable at once, and worked around.
        assert (await system.generate(prompt=[5])).token_ids == {0: wanted(8, prompt=[5])}


async def test_a_bug_in_one_request_leaves_the_session_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_system(
        tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode(script=Script(delay=0.01))]
    ) as system:
        other = asyncio.create_task(system.generate(prompt=[50]))
        broken = system.pipeline.generate(a_call())
        await anext(broken)
        async for output in broken:
            if isinstance(output, Piece):
                break
        (life,) = [life for life in system.pipeline._lives.running if life._call.prompt_token_ids != (50,)]
        monkeypatch.setattr(life._generation, "accept", lambda token: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            async for _ in broken:
                pass
        assert (await other).token_ids == {0: wanted(8, prompt=[50])}
        assert system.decodes[0].num_sessions == 1

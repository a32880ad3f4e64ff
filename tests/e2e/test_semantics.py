"""What a user relies on at the seam between prefill and decode: finish, stops, characters, log-probabilities, usage.

Rows of CASES.md are named in the tests.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pagewire import AsyncClient
from tests.e2e.cluster import Cluster
from tests.tiny_models import EOS

PROMPT = list(range(40, 60))


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client


async def test_max_tokens_1_needs_no_decode(client: AsyncClient) -> None:
    done = await client.complete(PROMPT, max_tokens=1, temperature=0, ignore_eos=True)
    assert (len(done.token_ids), done.finish_reason, done.decode_worker) == (1, "length", "")


async def test_eos_as_first_token_g9(client: AsyncClient) -> None:
    """G9: stop once, from P, and nothing is left on D."""
    done = await client.complete(PROMPT, max_tokens=8, temperature=0, logit_bias={EOS: 100.0})
    assert (done.token_ids, done.finish_reason) == ((EOS,), "stop")


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 100])
async def test_min_tokens_g6_g7(client: AsyncClient, min_tokens: int) -> None:
    """G6, G7: exactly min_tokens before an EOS that is always the likeliest, also over the seam at P's first token."""
    done = await client.complete(PROMPT, max_tokens=120, temperature=0, min_tokens=min_tokens, logit_bias={EOS: 100.0})
    assert done.token_ids.index(EOS) == min_tokens == len(done.token_ids) - 1
    assert done.finish_reason == "stop"


async def test_ignore_eos_wins_g18(client: AsyncClient) -> None:
    done = await client.complete(PROMPT, max_tokens=6, temperature=0, ignore_eos=True, logit_bias={EOS: 100.0})
    assert (done.token_ids, done.finish_reason) == ((EOS,) * 6, "length")
    done = await client.complete(
        PROMPT, max_tokens=6, temperature=0, ignore_eos=True, stop_token_ids=[EOS], logit_bias={EOS: 100.0}
    )
    assert (done.token_ids, done.finish_reason) == ((EOS,), "stop")


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_over_tokens_g1(client: AsyncClient, keep: bool) -> None:
    """G1: a stop string that is spread over tokens never leaks a prefix, kept or not."""
    free = await client.complete(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    start = next(i for i in range(8, len(free.text) - 7) if free.text.find(free.text[i : i + 7]) == i)
    stop = free.text[start : start + 7]
    expected = free.text[: start + 7] if keep else free.text[:start]
    pieces = ""
    async for chunk in client.generate(
        PROMPT, max_tokens=40, temperature=0, ignore_eos=True, stop=[stop], include_stop_str_in_output=keep
    ):
        pieces += chunk.text
        assert expected.startswith(pieces), "text was sent that should have been held back"
        reason = chunk.finish_reason or None
        if reason:
            assert reason == "stop"
    assert pieces == expected


async def test_characters_stay_whole_g5(client: AsyncClient) -> None:
    """G5: bytes of an emoji come one a token, forced by biases over the hand-off; no U+FFFD appears between them."""
    tokens = await client.tokenize("🙂안", add_special_tokens=False)
    for cut in range(1, len(tokens)):
        prompt = [*PROMPT, *tokens[:cut]]
        text = ""
        async for chunk in client.generate(prompt, max_tokens=3, temperature=0, logit_bias={tokens[cut]: 100.0}):
            text += chunk.text
            assert not any(0xD800 <= ord(c) <= 0xDFFF for c in text)
    done = await client.complete(PROMPT, max_tokens=4, temperature=0, logit_bias={tokens[0]: 100.0})
    assert "�" in done.text, "an unfinished character is flushed at the end"


async def test_logprobs_have_every_token_g11(client: AsyncClient) -> None:
    """G11: from P's first token on, the full list, alone or with n = 2."""
    for n in (1, 2):
        lists: list[list[float]] = [[] for _ in range(n)]
        ids: list[list[int]] = [[] for _ in range(n)]
        async for chunk in client.generate(
            PROMPT, max_tokens=6, temperature=0.8, seed=3, n=n, logprobs=5, ignore_eos=True
        ):
            ids[chunk.choice] += chunk.token_ids
            for entry in chunk.logprobs:
                assert len(entry.top) == 5
                assert entry.logprob <= entry.top[0][1] <= 0.0
                lists[chunk.choice].append(entry.logprob)
        assert [len(x) for x in lists] == [len(x) for x in ids] == [6] * n


async def test_cached_tokens_are_what_p_had(client: AsyncClient, cluster: Cluster) -> None:
    cluster.reset_caches()
    for _ in range(2):
        prompt = list(range(100, 100 + 21))
        done = await client.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True)
        cold = done.usage.cached_tokens
    assert cold == 20
    assert done.usage.prompt_tokens == 21
    salted = await client.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True, cache_salt="tenant-b")
    assert salted.usage.cached_tokens == 0
    assert salted.token_ids == done.token_ids


async def test_whole_block_prompts_twice_f9(client: AsyncClient) -> None:
    """F9, F6: prompts of whole blocks, cold and warm, give the same tokens."""
    for blocks in (1, 2, 3, 4):
        prompt = list(range(150, 150 + 4 * blocks))
        first = await client.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
        again = await client.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
        assert again.token_ids == first.token_ids
        assert [x.logprob for x in again.logprobs] == [x.logprob for x in first.logprobs], "bitwise"
        assert again.usage.cached_tokens == 4 * blocks - 1, "all but the last token"


async def test_a_client_that_goes_leaves_nothing(client: AsyncClient) -> None:
    """Cancel after 0 … 5 messages; the fixture then waits for every block, ticket and request to be gone."""
    for after in range(6):
        stream = client.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen > after:
                break
        await stream.aclose()
    calls = [asyncio.create_task(client.complete(PROMPT, max_tokens=200, ignore_eos=True)) for _ in range(6)]
    await asyncio.sleep(0.02)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_chat_equals_rendered_text(client: AsyncClient) -> None:
    chat = await client.complete(chat=[{"role": "user", "content": "hi there"}], max_tokens=5, temperature=0)
    text = "<start_of_turn>user\nhi there<end_of_turn>\n<start_of_turn>assistant\n"
    plain = await client.complete(text, max_tokens=5, temperature=0)
    assert chat.token_ids == plain.token_ids


async def test_tokenize_round_trip(client: AsyncClient) -> None:
    for text in ("hello", "naïve café", "日本語 テキスト", "🙂🇩🇪", "a\n\tb  c", "\u0000x"):
        ids = await client.tokenize(text, add_special_tokens=False)
        assert await client.detokenize(ids) == text


async def test_two_requests_with_the_same_name_and_seed(client: AsyncClient) -> None:
    """A11, A12, G13: ids are the router's own; equal seeds side by side give equal tokens."""
    both = await asyncio.gather(
        *(client.complete(PROMPT, max_tokens=12, temperature=1.0, seed=9, request_id="same") for _ in range(2))
    )
    assert both[0].token_ids == both[1].token_ids

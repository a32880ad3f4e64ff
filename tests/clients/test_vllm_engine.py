"""VllmEngine itself, on the router and on both workers: what gateways rely on without saying so."""

import hashlib
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import grpc
import pytest

from pagewire import Client
from pagewire.errors import from_rpc_error
from pagewire.foreign.smg import common_pb2 as common
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.foreign.smg.vllm_engine_pb2_grpc import VllmEngineStub
from pagewire.v1 import types_pb2
from tests.clients.conftest import Served
from tests.tiny_models import EOS

PROMPT = tuple(range(20, 33))
KEEP = json.dumps({"do_remote_decode": True})


class Stubs:
    """The service at the router, the prefill and the decode worker."""

    def __init__(self, *channels: grpc.Channel) -> None:
        self.router, self.prefill, self.decode = (VllmEngineStub(channel) for channel in channels)

    def hand_off(self, **sampling: Any) -> str:
        """What a prefill worker answers a gateway, whose requests there are for one token that ends nothing."""
        plain = {k: v for k, v in sampling.items() if k not in ("min_tokens", "stop", "stop_token_ids")}
        request = ask(**{**plain, "max_tokens": 1, "ignore_eos": True}, kv=KEEP)
        (complete,) = completes(self.prefill.Generate(request, timeout=60))
        assert complete.finish_reason == "length"
        return complete.kv_transfer_params_json


@pytest.fixture
def stubs(served: Served) -> Iterator[Stubs]:
    targets = [
        served.cluster.target,
        *(served.endpoint(role) for role in (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE)),
    ]
    channels = [grpc.insecure_channel(target) for target in targets]
    yield Stubs(*channels)
    for channel in channels:
        channel.close()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


def ask(*, stream: bool = False, kv: str = "", request_id: str = "", **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
        stream=stream,
    )
    if kv:
        request.kv_transfer_params_json = kv
    return request


def completes(responses: Any) -> list[pb.GenerateComplete]:
    return [response.complete for response in responses if response.HasField("complete")]


@contextmanager
def refused(code: grpc.StatusCode, text: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = from_rpc_error(caught.value)
    assert (error.code, text in error.message) == (code, True), error.message


INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_zeros_mean_the_defaults(stubs: Stubs, client: Client) -> None:
    """A request in which nothing is set: temperature 1 and everything else as if it were left out."""
    wanted = client.complete(PROMPT, max_tokens=6, seed=5)
    params = pb.SamplingParams(max_tokens=6, seed=5)
    for field in ("top_p", "top_k", "min_p", "repetition_penalty", "n", "min_tokens"):
        assert getattr(params, field) == 0
    for stub in (stubs.router, stubs.decode):
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=params)
        (complete,) = completes(stub.Generate(request, timeout=60))
        assert tuple(complete.output_ids) == wanted.token_ids
        assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 6)
    request.sampling_params.seed = -1  # signed here
    same = client.complete(PROMPT, max_tokens=6, seed=2**64 - 1)
    assert tuple(completes(stubs.router.Generate(request, timeout=60))[0].output_ids) == same.token_ids


def test_streams_chunks_then_a_complete_for_each_choice(stubs: Stubs, client: Client) -> None:
    wanted = client.complete(PROMPT, max_tokens=6, seed=5, n=2, logprobs=2)
    for stub in (stubs.router, stubs.decode):
        *chunks, one, two = stub.Generate(ask(stream=True, temperature=1, seed=5, n=2, logprobs=2, max_tokens=6))
        for number, last in enumerate((one.complete, two.complete)):
            own = [each.chunk for each in chunks if each.chunk.index == number]
            assert tuple(t for chunk in own for t in chunk.token_ids) == wanted.choices[number].token_ids
            assert tuple(last.output_ids) == wanted.choices[number].token_ids
            assert [value for chunk in own for value in chunk.output_logprobs.token_logprobs] == pytest.approx(
                [each.logprob for each in wanted.choices[number].logprobs]
            )
            assert [len(top.token_ids) for top in last.output_logprobs.top_logprobs] == [2] * 6
            assert (last.index, last.finish_reason) == (number, "length")


def test_text_and_truncation(stubs: Stubs, client: Client) -> None:
    ids = list(client.tokenize("the rain in Spain"))
    params = pb.SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5)
    request = pb.GenerateRequest(text="the rain in Spain", sampling_params=params)
    (complete,) = completes(stubs.router.Generate(request, timeout=60))
    assert tuple(complete.output_ids) == client.complete(ids[-5:], temperature=0, max_tokens=4).token_ids
    assert complete.prompt_tokens == 5
    with refused(INVALID, "text: is for routers"):
        list(stubs.decode.Generate(request, timeout=60))


def test_stop_strings_and_stop_tokens(stubs: Stubs, client: Client) -> None:
    free = client.complete(PROMPT, temperature=0, max_tokens=20, ignore_eos=True)
    stop = next(a + b for a, b in pairwise(free.text[3:]) if (a + b).isascii())
    wanted = client.complete(PROMPT, temperature=0, max_tokens=20, ignore_eos=True, stop=[stop])
    for stub, kv in ((stubs.router, ""), (stubs.decode, ""), (stubs.decode, stubs.hand_off())):
        (complete,) = completes(stub.Generate(ask(max_tokens=20, ignore_eos=True, stop=[stop], kv=kv), timeout=60))
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
        assert tuple(complete.output_ids) == wanted.token_ids
    token_id = free.token_ids[4]
    for stub, kv in ((stubs.router, ""), (stubs.decode, stubs.hand_off())):
        (complete,) = completes(stub.Generate(ask(max_tokens=20, stop_token_ids=[token_id], kv=kv), timeout=60))
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", token_id)


@pytest.mark.parametrize("where", ["router", "decode"])
def test_abort_ends_the_stream_itself(stubs: Stubs, served: Served, where: Literal["router", "decode"]) -> None:
    stub = getattr(stubs, where)
    for _ in range(10):  # a busy machine may be done before the abort comes
        stream = stub.Generate(ask(stream=True, max_tokens=240, ignore_eos=True, request_id="mine"), timeout=30)
        next(stream)
        stub.Abort(pb.AbortRequest(request_ids=["nobody's", "mine"]))
        (complete,) = completes(stream)  # and a status that is OK
        if complete.finish_reason == "abort":
            break
    assert complete.finish_reason == "abort"
    assert complete.completion_tokens < 240
    assert stub.GetServerInfo(pb.GetServerInfoRequest()).active_requests == 0
    served.cluster.wait_quiet()


def test_first_token_that_ends_everything(stubs: Stubs) -> None:
    """G9: prefill was told to ignore the end token; decode knows better, and gives the ticket back."""
    bias = {EOS: 100.0}
    kv = stubs.hand_off(logit_bias=bias)
    (complete,) = completes(stubs.decode.Generate(ask(logit_bias=bias, kv=kv), timeout=60))
    assert (list(complete.output_ids), complete.finish_reason) == ([EOS], "stop")
    kv = stubs.hand_off()
    (complete,) = completes(stubs.decode.Generate(ask(max_tokens=1, kv=kv), timeout=60))
    assert (len(complete.output_ids), complete.finish_reason) == (1, "length")


@pytest.mark.parametrize("min_tokens", range(1, 4))
def test_min_tokens_although_prefill_knew_of_none(stubs: Stubs, client: Client, min_tokens: int) -> None:
    """G6, G7."""
    bias = {EOS: 100.0}
    wanted = client.complete(PROMPT, temperature=0, max_tokens=8, min_tokens=min_tokens, logit_bias=bias)
    assert len(wanted.token_ids) == min_tokens + 1
    kv = stubs.hand_off(logit_bias=bias)
    (complete,) = completes(stubs.decode.Generate(ask(logit_bias=bias, min_tokens=min_tokens, kv=kv), timeout=60))
    assert tuple(complete.output_ids) == wanted.token_ids


def test_unseeded_sampling_goes_on_with_prefills_seed(stubs: Stubs, client: Client) -> None:
    kv = stubs.hand_off(temperature=1)
    seed = int(json.loads(kv)["pagewire"]["seed"])
    (complete,) = completes(stubs.decode.Generate(ask(temperature=1, kv=kv), timeout=60))
    assert tuple(complete.output_ids) == client.complete(PROMPT, seed=seed, max_tokens=8).token_ids


def test_a_ticket_is_good_once_and_never_needed(stubs: Stubs, client: Client) -> None:
    """A hand-off that comes twice, or whose worker has forgotten it, costs a prefill and no token."""
    wanted = client.complete(PROMPT, temperature=0, max_tokens=8).token_ids
    kv = stubs.hand_off()
    for _ in range(2):
        (complete,) = completes(stubs.decode.Generate(ask(kv=kv), timeout=60))
        assert tuple(complete.output_ids) == wanted


def test_a_form_of_the_text(stubs: Stubs, client: Client) -> None:
    """The same on the router and, with a hand-off, on the workers."""
    forms = {"regex": "[ab]{3}", "choice": pb.ChoiceConstraint(choices=["left", "right"]), "json_object": True}
    for kind, form in forms.items():
        (whole,) = completes(stubs.router.Generate(ask(max_tokens=30, **{kind: form}), timeout=60))
        text = client.detokenize(whole.output_ids)
        if kind == "regex":
            assert re.fullmatch("[ab]{3}", text)
        elif kind == "choice":
            assert text in ("left", "right")
        else:
            assert text.startswith("{")
        ticket = stubs.hand_off(max_tokens=30, **{kind: form})
        (after,) = completes(stubs.decode.Generate(ask(kv=ticket, max_tokens=30, **{kind: form}), timeout=60))
        assert after.output_ids == whole.output_ids, kind
    with refused(INVALID, "structured_output"):
        list(stubs.router.Generate(ask(regex="["), timeout=60))
    with refused(INVALID, "sampling_params.structural_tag"):
        list(stubs.router.Generate(ask(structural_tag="{}"), timeout=60))


def test_what_is_refused(stubs: Stubs) -> None:
    def of(stub: VllmEngineStub, request: pb.GenerateRequest) -> None:
        list(stub.Generate(request, timeout=60))

    with refused(INVALID, "input: is missing"):
        of(stubs.router, pb.GenerateRequest())
    with refused(INVALID, "tokenized.input_ids"):
        of(stubs.decode, pb.GenerateRequest(tokenized=pb.TokenizedInput()))
    with refused(INVALID, "vocabulary size of 300"):
        of(stubs.decode, pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[300])))
    with refused(INVALID, "at most 255 fit"):
        of(stubs.decode, pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[9] * 256)))
    with refused(INVALID, "sampling_params.max_tokens = 8: must be 1"):
        of(stubs.prefill, ask())
    with refused(INVALID, "a router hands nothing off"):
        of(stubs.router, ask(kv=KEEP))
    with refused(INVALID, "do_remote_decode is for prefill workers"):
        of(stubs.decode, ask(kv=KEEP))
    with refused(INVALID, "must be a JSON object"):
        of(stubs.decode, ask(kv="[1]"))
    kv = json.loads(stubs.hand_off())
    with refused(INVALID, "num_prompt_tokens"):
        of(stubs.decode, ask(kv=json.dumps({**kv, "pagewire": {**kv["pagewire"], "num_prompt_tokens": 3}})))
    for damage in ({}, {"ticket": "zz"}, {"incarnation": -1}, {"first_token": None}):
        own = {**kv["pagewire"], **damage} if damage else {}
        with refused(INVALID, "pagewire: is damaged"):
            of(stubs.decode, ask(kv=json.dumps({**kv, "pagewire": own})))
    with refused(INVALID, "sampling.top_p"):
        of(stubs.router, ask(top_p=2.0))
    with refused(grpc.StatusCode.UNIMPLEMENTED, "pagewire has no Embed"):
        stubs.router.Embed(pb.EmbedRequest())


def test_who_they_are(stubs: Stubs, served: Served) -> None:
    for stub in (stubs.router, stubs.prefill, stubs.decode):
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, list(info.architectures)) == (
            "tiny", "llama", ["LlamaForCausalLM"],
        )  # fmt: skip
        assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (256, 300, [EOS])
        assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
        deadline = time.monotonic() + 60  # until what the test before has left is told
        while True:
            (load,) = stub.GetLoads(pb.GetLoadsRequest()).loads
            found = (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests)
            if found == (0, 0, 8) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert found == (0, 0, 8)
        assert (load.num_used_tokens, load.max_total_num_tokens > 256) == (0, True)
    prefill, decode = (stub.GetServerInfo(pb.GetServerInfoRequest()) for stub in (stubs.prefill, stubs.decode))
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert prefill.pairing_protocol == decode.pairing_protocol
    assert prefill.kv_engine_id != decode.kv_engine_id


def test_tokenizer_in_a_zip(stubs: Stubs, served: Served) -> None:
    *chunks, last = stubs.router.GetTokenizer(common.GetTokenizerRequest())
    archive = b"".join(chunk.data for chunk in (*chunks, last))
    assert last.sha256 == hashlib.sha256(archive).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(files.namelist())
        assert files.read("tokenizer.json") == (served.model / "tokenizer.json").read_bytes()


class Follower:
    """Applies a stream of KvEventBatch as a gateway does."""

    def __init__(self, stub: VllmEngineStub, start: int = 0) -> None:
        self.stream = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start), timeout=60)
        self.held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.seq = start

    def read(self, *, until: int) -> None:
        """Reads on until that many blocks are held."""
        while len(self.held) != until:
            self.read_one()

    def read_one(self) -> common.KvEventBatch:
        batch = next(self.stream)
        if batch.load.load_only:
            assert batch.sequence_number == self.seq
            return batch
        assert not self.seq or batch.sequence_number == self.seq + 1
        self.seq = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.held.clear()
            elif kind == "removed":
                for block_hash in event.removed.block_hashes:
                    del self.held[block_hash]
            else:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.held
                for block in event.stored.blocks:
                    self.held[block.block_hash] = (parent, tuple(block.token_ids))
                    parent = block.block_hash
        return batch

    def chains(self) -> set[tuple[int, ...]]:
        """Every held block with all tokens before it."""

        def chain(block_hash: int) -> tuple[int, ...]:
            parent, token_ids = self.held[block_hash]
            return (*(chain(parent) if parent is not None else ()), *token_ids)

        return {chain(block_hash) for block_hash in self.held}


def test_kv_events_of_the_router_are_those_of_all_workers(stubs: Stubs, client: Client, served: Served) -> None:
    served.cluster.reset_caches()
    follower = Follower(stubs.router)
    follower.read_one()
    follower.read(until=0)
    output = client.complete(PROMPT, temperature=0, max_tokens=8).token_ids
    # Prefill has the prompt's blocks, decode those and its own; each is there once.
    tokens = (*PROMPT, *output[:-1])
    follower.read(until=len(tokens) // 4)
    assert follower.chains() == {tokens[:end] for end in range(4, len(tokens) + 1, 4)}
    resumed = Follower(stubs.router, start=follower.seq)
    resumed.held = dict(follower.held)
    stubs.prefill.FlushCache(common.FlushCacheRequest(timeout_s=10))
    stubs.decode.FlushCache(common.FlushCacheRequest(timeout_s=10))
    for each in (follower, resumed):
        each.read(until=0)
        each.stream.cancel()


def test_kv_events_of_a_worker(stubs: Stubs, client: Client, served: Served) -> None:
    served.cluster.reset_caches()
    follower = Follower(stubs.prefill)
    started = time.monotonic()
    follower.stream.initial_metadata()  # at once, although nothing has happened
    assert time.monotonic() - started < 60
    first = follower.read_one()
    assert (first.snapshot.count, first.snapshot.blocks, follower.held) == (1, 0, {})
    client.complete(PROMPT, temperature=0, max_tokens=4)
    follower.read(until=3)
    wanted = {PROMPT[:4], PROMPT[:8], PROMPT[:12]}
    assert follower.chains() == wanted
    # Who comes later gets the same as a snapshot; who was there goes on where it was.
    joined = Follower(stubs.prefill)
    assert joined.read_one().snapshot.blocks == 3
    assert joined.chains() == wanted
    client.complete((*PROMPT[:8], 50, 51, 52, 53, 54), temperature=0, max_tokens=4)
    resumed = Follower(stubs.prefill, start=joined.seq)
    resumed.held = dict(joined.held)
    resumed.read(until=4)
    assert resumed.chains() == wanted | {(*PROMPT[:8], 50, 51, 52, 53)}
    assert stubs.prefill.FlushCache(common.FlushCacheRequest(timeout_s=10)).success
    follower.read(until=0)
    assert follower.read_one().load.max_running_requests == 8
    with refused(grpc.StatusCode.OUT_OF_RANGE, "start from 0 for a snapshot"):
        Follower(stubs.prefill, start=1).read_one()
    for each in (follower, joined, resumed):
        each.stream.cancel()


def test_flushing_says_whether_anything_stayed(stubs: Stubs, client: Client, served: Served) -> None:
    client.complete(PROMPT, temperature=0, max_tokens=4)
    answer = stubs.router.FlushCache(common.FlushCacheRequest(timeout_s=5))
    assert (answer.success, "forgot" in answer.message) == (True, True)
    assert all(served.cluster.worker_status(worker).num_cached_blocks == 0 for worker in served.cluster.workers())
    streams = [stubs.router.Generate(ask(stream=True, max_tokens=240, ignore_eos=True), timeout=30) for _ in range(16)]
    next(streams[0])
    assert not stubs.router.FlushCache(common.FlushCacheRequest()).success
    for stream in streams:
        stream.cancel()

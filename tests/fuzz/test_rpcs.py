"""Every RPC of every process gets anything that protobuf can carry, and bytes that are no protobuf.

An answer may be any status but those that mean a bug (INTERNAL, UNKNOWN, …), and it must come.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.transfer.negotiate import boot_id
from kvstore.hashing import block_keys
from pagewire.v1 import (
    admin_pb2,
    decode_pb2,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
    worker_pb2,
)
from tests.fuzz.conftest import PROMPT, Target
from tests.fuzz.messages import messages

SERVED: Mapping[str, tuple[ModuleType, ...]] = {
    "r0": (inference_pb2, admin_pb2, health_pb2, reflection_pb2),
    "p0": (prefill_pb2, transfer_pb2, worker_pb2, admin_pb2, health_pb2, reflection_pb2),
    "d0": (decode_pb2, transfer_pb2, worker_pb2, admin_pb2, health_pb2, reflection_pb2),
}
# What workers have only because a router has it.
ROUTERS_ONLY = {("p0", "ExplainRoute"), ("d0", "ExplainRoute")}
# The same code on both kinds of worker, and slower than most.
PREFIX_CONTROL = {"LookUpPrefix", "PinPrefix", "ClearPrefix", "MovePrefix"}
# Streams that last until somebody ends them: one answer is enough.
ENDLESS = {"Watch", "WatchWorker", "Hold"}
# These need a worker that exists, a ticket whose lease may be over soon, or adapters, which are not served there.
ALWAYS_REFUSED = {"Attach", "Pull", "Drain", "MovePrefix", "LoadAdapter", "UnloadAdapter"}
# What these do takes a while; the rest is cheap.
SLOW = {"Generate", "Prefill", "Decode", "Session", *PREFIX_CONTROL}
NUM_SLOW, NUM_CHEAP = 5, 15  # examples of up to 4 inputs each
NUM_NIGHTLY = 100_000
CALL_SECONDS = 1.0
BUGS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass(frozen=True)
class Method:
    """One RPC of one process."""

    process: str
    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    def __str__(self) -> str:
        return f"{self.process} {self.descriptor.containing_service.name}.{self.descriptor.name}"


METHODS = [
    Method(process, method)
    for process, modules in SERVED.items()
    for module in modules
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if (process, method.name) not in ROUTERS_ONLY and not (process == "d0" and method.name in PREFIX_CONTROL)
]


class Fuzzer:
    """Sends inputs to one method and judges the answers."""

    def __init__(self, target: Target, method: Method, channel: grpc.Channel) -> None:
        self.method = method
        self.codes: Counter[str] = Counter()
        self._call = channel.stream_stream(method.path, request_serializer=_to_bytes)
        bases, known = _valid(target)
        self._ticket = known["ticket"][0]
        one = messages(method.descriptor.input_type, bases, known)
        if method.descriptor.name == "Drain":  # no bytes either: none at all are the order to drain
            one_or_bytes = one.map(_of_nobody)
        else:
            one_or_bytes = st.one_of(one, one, one, one, st.binary(max_size=60))
        streams = method.descriptor.client_streaming
        call = st.lists(one_or_bytes, max_size=6) if streams else one_or_bytes.map(lambda message: [message])
        self.inputs = st.lists(call, min_size=1, max_size=4)
        self.good = [] if method.descriptor.name == "Drain" else bases.get(method.descriptor.input_type.full_name, [])

    def send(self, calls: list[list[Message | bytes]]) -> None:
        """All at once."""
        running = [self._call(iter(requests), timeout=CALL_SECONDS) for requests in calls]
        for requests, call in zip(calls, running, strict=True):
            try:
                for _ in call:
                    if self.method.descriptor.name in ENDLESS:
                        call.cancel()
                        break
                self.codes["OK"] += 1
            except grpc.RpcError:
                code, details = call.code(), call.details()
                self.codes[code.name] += 1
                assert code not in BUGS, f"{self.method}: {code.name}: {details}\n{requests}"

    def release(self, prefill: grpc.Channel) -> None:
        """Ends the ticket that was made for the inputs, so that nobody waits 3 s for its lease to end."""
        request = transfer_pb2.ReleaseRequest(ticket=self._ticket, epoch=1)
        with suppress(grpc.RpcError):  # an input has ended it
            transfer_pb2_grpc.KvTransferServiceStub(prefill).Release(request, timeout=20)


def _to_bytes(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _of_nobody(message: Message) -> Message:
    """A drain of an unknown worker: a real one would end the test."""
    return admin_pb2.DrainRequest(worker_id=f"no {message}"[:100])


def _valid(target: Target) -> tuple[dict[str, list[Message]], dict[str, list[Any]]]:
    """Messages that work, and values that name things that exist."""
    info = target.system.status("p0").info
    sampling = types_pb2.SamplingParams(n=1, max_tokens=3, temperature=0.0, seed=1)
    work = types_pb2.WorkerRequest(request_id="fuzz", model="tiny", prompt_token_ids=PROMPT, sampling=sampling)
    source = decode_pb2.TransferSource(
        endpoint=info.endpoint, worker_id="p0", incarnation=info.incarnation, ticket=bytes(16)
    )
    decode = decode_pb2.DecodeRequest(request=work)
    pulled = decode_pb2.DecodeRequest(request=work, source=source)
    handshake = transfer_pb2.HandshakeRequest(
        worker_id="d0", incarnation=1, fingerprint=info.fingerprint, planes=[1, 2, 3, 4], boot_id=boot_id()
    )
    tokens = inference_pb2.TokenPrompt(token_ids=PROMPT)
    ticket = _ticket(info.endpoint, work)
    block_size = info.fingerprint.block_size
    to_tokens = inference_pb2.GenerateRequest(tokens=tokens)
    keys = block_keys(info.fingerprint.root, PROMPT, block_size)
    source.ticket = ticket
    bases: list[Message] = [
        sampling, work, source, decode, pulled, handshake, tokens,
        prefill_pb2.PrefillRequest(request=work, hand_off=True), prefill_pb2.PrefillRequest(request=work),
        decode_pb2.SessionStart(handle=1, decode=decode), decode_pb2.SessionStart(handle=2, decode=pulled),
        decode_pb2.SessionRequest(start=decode_pb2.SessionStart(handle=1, decode=decode)),
        decode_pb2.SessionRequest(cancel=decode_pb2.SessionCancel(handle=1)),
        inference_pb2.GenerateRequest(text="the", sampling=sampling),
        inference_pb2.GenerateRequest(tokens=tokens, sampling=sampling),
        inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
            sampling=sampling,
        ),
        inference_pb2.TokenizeRequest(text="the"), inference_pb2.DetokenizeRequest(token_ids=PROMPT),
        types_pb2.ChoiceState(choice=0, output_token_ids=[20, 21]),
        transfer_pb2.AttachRequest(ticket=ticket, worker_id="d0"), transfer_pb2.ReleaseRequest(ticket=ticket, epoch=1),
        *(transfer_pb2.PullRequest(ticket=ticket, epoch=1, plane=plane) for plane in (1, 2, 4)),
        transfer_pb2.TicketEpoch(ticket=ticket, epoch=1),
        transfer_pb2.AttachPrefixRequest(keys=b"".join(keys), token_ids=PROMPT[: len(keys) * block_size]),
        admin_pb2.ExplainRouteRequest(request=to_tokens), admin_pb2.LookUpPrefixRequest(request=to_tokens),
        admin_pb2.PinPrefixRequest(request=to_tokens), admin_pb2.ClearPrefixRequest(request=to_tokens),
    ]  # fmt: skip
    by_name: dict[str, list[Message]] = {}
    for base in bases:
        by_name.setdefault(base.DESCRIPTOR.full_name, []).append(base)
    services = [f"pagewire.v1.{name}Service" for name in ("Inference", "Admin", "Prefill", "Decode", "KvTransfer")]
    known: dict[str, list[Any]] = {
        "worker_id": ["p0", "d0", ""],
        "to_worker_id": ["p0", "d0", ""],
        "from_worker_id": ["p0", "d0", ""],
        "ttl_seconds": [0, 1, 60],
        "incarnation": [info.incarnation],
        # Nobody listens at the others; a name would ask a resolver on the network.
        "endpoint": [info.endpoint, "", "127.0.0.1:1", ":", "127.0.0.1", "unix:/nowhere", "127.0.0.1:99999"],
        "model": ["tiny", "", "other"],
        "request_id": ["a", "b", "", "x" * 257],
        "token_ids": [1, 20, 299, 300],
        "prompt_token_ids": [1, 20, 299, 300],
        "handle": [0, 1, 2],
        "ticket": [ticket, bytes(16), b""],
        "epoch": [0, 1, 2],
        "service": services,
        "file_containing_symbol": services,
        "symbol": services,
    }
    return by_name, known


def _ticket(endpoint: str, work: types_pb2.WorkerRequest) -> bytes:
    """Of KV that is held for some seconds, attached under epoch 1."""
    with grpc.insecure_channel(endpoint) as channel:
        prefill = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill
        *_, accepted = (
            event.accepted.ticket
            for event in prefill(prefill_pb2.PrefillRequest(request=work, hand_off=True), timeout=20)
            if event.HasField("accepted")
        )
        transfer = transfer_pb2_grpc.KvTransferServiceStub(channel)
        transfer.Attach(transfer_pb2.AttachRequest(ticket=accepted, worker_id="d0"), timeout=20)
    return bytes(accepted)


@pytest.fixture(scope="module")
def channels(target: Target) -> Iterator[dict[str, grpc.Channel]]:
    opened = {name: grpc.insecure_channel(target.system[name].endpoint) for name in SERVED}
    yield opened
    for channel in opened.values():
        channel.close()


def fuzz(fuzzer: Fuzzer, num_examples: int, tick: Callable[[], None] = lambda: None) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(fuzzer.inputs)
    def run(calls: list[list[Message | bytes]]) -> None:
        fuzzer.send(calls)
        tick()

    run()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_any_input_has_an_honest_answer(target: Target, channels: dict[str, grpc.Channel], method: Method) -> None:
    fuzzer = Fuzzer(target, method, channels[method.process])
    fuzzer.send([[message] for message in fuzzer.good])
    fuzz(fuzzer, NUM_SLOW if method.descriptor.name in SLOW else NUM_CHEAP)
    print(dict(fuzzer.codes))
    fuzzer.release(channels["p0"])
    # Some are good, so that the bad ones are near enough to good ones to get far.
    assert fuzzer.codes["OK"] or method.descriptor.name in ALWAYS_REFUSED
    target.check()


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_inputs(
    target: Target, channels: dict[str, grpc.Channel], capsys: pytest.CaptureFixture[str]
) -> None:
    started, num_inputs, codes = time.monotonic(), 0, Counter[str]()
    for done, method in enumerate(METHODS, 1):
        while num_inputs < NUM_NIGHTLY * done / len(METHODS):
            fuzzer = Fuzzer(target, method, channels[method.process])  # each with a ticket that is not over yet
            fuzz(fuzzer, 500)
            num_inputs += fuzzer.codes.total()
            codes += fuzzer.codes
        target.check()
        with capsys.disabled():
            print(f"\n{method}: {num_inputs} inputs after {time.monotonic() - started:.0f} s", end="", flush=True)
    print(dict(codes))

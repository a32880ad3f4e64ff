"""The receiver's RPCs to one other worker: between the wire and plain data, block bytes past protobuf."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from engine.transfer.frames import BlockFrame, FrameError, decode_frame
from engine.transfer.plane import Plane, RemoteBlock, SharedPoolInfo, plane_of
from pagewire.errors import from_rpc_error
from pagewire.v1 import transfer_pb2, transfer_pb2_grpc
from pagewire.worker_view import WorkerDescription
from pagewire.worker_view_wire import fingerprint_to_proto

_PULL = "/pagewire.v1.KvTransferService/Pull"
_SINCE_PREFILL = "pagewire-ms-since-prefill"


@dataclass(frozen=True, slots=True)
class Offer:
    """The sender's answer to a handshake."""

    incarnation: int
    planes: tuple[Plane, ...]
    pool: SharedPoolInfo


@dataclass(frozen=True, slots=True)
class Attached:
    """The right to a ticket."""

    epoch: int
    lease_seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AttachedPrefix:
    """The right to a ticket over the sender's cached blocks, of which it holds `num_blocks` leading ones."""

    ticket: bytes
    epoch: int
    lease_seconds: float
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Blocks that can be read out of the sender's pool. `keys` are empty for a partial last block."""

    ticket: bytes
    epoch: int
    first_block: int
    blocks: tuple[RemoteBlock, ...]
    keys: tuple[bytes, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One choice's first token."""

    choice: int
    index: int
    token_id: int
    finished: bool


@dataclass(frozen=True, slots=True)
class PulledEnd:
    """All blocks were sent. `seconds_since_prefill` is None if the sender did not say."""

    num_tokens: int
    num_cached_tokens: int
    first_tokens: tuple[FirstToken, ...]
    seconds_since_prefill: float | None


class TransferClient:
    """Raises PagewireError with the sender's code."""

    def __init__(self, channel: grpc.aio.Channel, me: WorkerDescription) -> None:
        self._me = me
        self._stub: Any = transfer_pb2_grpc.KvTransferServiceStub(channel)
        self._pull: Any = channel.unary_stream(
            _PULL, request_serializer=transfer_pb2.PullRequest.SerializeToString, response_deserializer=None
        )

    async def handshake(self, planes: Sequence[Plane], boot_id: str, pid: int, timeout: float) -> Offer:
        """Compares fingerprints and learns which planes the sender has."""
        request = transfer_pb2.HandshakeRequest(
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            fingerprint=fingerprint_to_proto(self._me.fingerprint),
            planes=[transfer_pb2.TransferPlane.ValueType(plane.value) for plane in planes],
            boot_id=boot_id,
            pid=pid,
        )
        response: transfer_pb2.HandshakeResponse = await self._call(self._stub.Handshake, request, timeout)
        pool = response.shared_pool
        return Offer(
            incarnation=response.incarnation,
            planes=tuple(plane for number in response.planes if (plane := plane_of(number)) is not None),
            pool=SharedPoolInfo(
                pid=pool.pid,
                pool_address=pool.pool_address,
                generations_address=pool.generations_address,
                pool_bytes=pool.pool_bytes,
                socket_name=pool.socket_name,
                token=pool.token,
                token_address=pool.token_address,
                nixl_metadata=pool.nixl_metadata,
                tcp_port=pool.tcp_port,
                tcp_secret=pool.tcp_secret,
            ),
        )

    async def attach(self, ticket: bytes, timeout: float) -> Attached:
        """Takes the ticket over."""
        request = transfer_pb2.AttachRequest(
            ticket=ticket, worker_id=self._me.worker_id, incarnation=self._me.incarnation
        )
        response: transfer_pb2.AttachResponse = await self._call(self._stub.Attach, request, timeout)
        return Attached(response.epoch, response.lease_ms / 1000, response.num_tokens)

    async def attach_prefix(
        self, keys: Sequence[bytes], token_ids: Sequence[int], first_block: int, timeout: float, *, always: bool = False
    ) -> AttachedPrefix:
        """Asks for cached blocks from `first_block` on; `keys` and `token_ids` are those of the whole prefix.

        `always`: the sender loads them from its tiers whatever that costs.
        """
        request = transfer_pb2.AttachPrefixRequest(
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            keys=b"".join(keys),
            token_ids=token_ids,
            first_block=first_block,
            always=always,
        )
        response: transfer_pb2.AttachPrefixResponse = await self._call(self._stub.AttachPrefix, request, timeout)
        return AttachedPrefix(response.ticket, response.epoch, response.lease_ms / 1000, response.num_blocks)

    async def pull(
        self, ticket: bytes, epoch: int, first_block: int, plane: Plane, first_blocks: Sequence[int] = ()
    ) -> AsyncGenerator[BlockFrame | ReadyBlocks | PulledEnd, None]:
        """What the sender streams; `first_blocks` are wanted of KV groups 1, 2, ….

        FrameError for bytes that are no event of this pull. Closing it ends the RPC.
        """
        request = transfer_pb2.PullRequest(
            ticket=ticket,
            epoch=epoch,
            first_block=first_block,
            plane=transfer_pb2.TransferPlane.ValueType(plane.value),
            first_blocks=first_blocks,
        )
        call = self._pull(request)
        try:
            async with aclosing(_read_ahead(call)) as messages:
                async for message in messages:
                    event = _event(message)
                    if isinstance(event, transfer_pb2.PullEnd):
                        yield _end(event, await call.trailing_metadata())
                        return
                    if (event.ticket, event.epoch) != (ticket, epoch) or event.group > len(first_blocks):
                        raise FrameError(f"blocks of epoch {event.epoch} in the pull of epoch {epoch}")
                    yield event if isinstance(event, BlockFrame) else _ready(event)
            raise FrameError("the pull ended without its end")
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def heartbeat(self, held: Sequence[tuple[bytes, int]], timeout: float) -> list[bytes]:
        """Extends leases; returns the tickets that were refused."""
        request = transfer_pb2.HeartbeatRequest(
            tickets=[transfer_pb2.TicketEpoch(ticket=ticket, epoch=epoch) for ticket, epoch in held]
        )
        response: transfer_pb2.HeartbeatResponse = await self._call(self._stub.Heartbeat, request, timeout)
        return list(response.refused)

    async def hold(self) -> None:
        """Shows the sender that this worker is there, until the connection breaks (PagewireError) or it is stopped."""
        request = transfer_pb2.HoldRequest(worker_id=self._me.worker_id, incarnation=self._me.incarnation)
        call = self._stub.Hold(request, wait_for_ready=True)
        try:
            async for _ in call:
                pass
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def release(self, ticket: bytes, epoch: int, timeout: float) -> bool:
        """Gives a ticket back."""
        request = transfer_pb2.ReleaseRequest(ticket=ticket, epoch=epoch)
        response: transfer_pb2.ReleaseResponse = await self._call(self._stub.Release, request, timeout)
        return response.released

    async def _call(self, method: Any, request: Any, timeout: float) -> Any:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


async def _read_ahead(call: Any) -> AsyncGenerator[bytes, None]:
    """The call's messages. While one is being used, the next is on its way."""
    reading = asyncio.ensure_future(call.read())
    try:
        while (message := await reading) is not grpc.aio.EOF:
            reading = asyncio.ensure_future(call.read())
            yield message
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _event(message: bytes) -> BlockFrame | transfer_pb2.BlocksReady | transfer_pb2.PullEnd:
    frame = decode_frame(message)
    if frame is not None:
        return frame
    try:
        response = transfer_pb2.PullResponse.FromString(message)
    except DecodeError as error:
        raise FrameError(f"neither a frame nor a message: {error}") from None
    if response.HasField("ready"):
        return response.ready
    if response.HasField("end"):
        return response.end
    raise FrameError("an event that this version does not know")


def _ready(ready: transfer_pb2.BlocksReady) -> ReadyBlocks:
    return ReadyBlocks(
        ticket=ready.ticket,
        epoch=ready.epoch,
        first_block=ready.first_block,
        blocks=tuple(RemoteBlock(block.slot, block.generation, block.checksum) for block in ready.blocks),
        keys=tuple(block.key for block in ready.blocks),
        group=ready.group,
    )


def _end(end: transfer_pb2.PullEnd, trailer: Any) -> PulledEnd:
    text = next((value for key, value in trailer or () if key == _SINCE_PREFILL), None)
    try:
        since = None if text is None else float(text) / 1000
    except ValueError:
        since = None
    return PulledEnd(
        num_tokens=end.num_tokens,
        num_cached_tokens=end.num_cached_tokens,
        first_tokens=tuple(
            FirstToken(token.choice, token.index, token.token_id, bool(token.finish_reason))
            for token in end.first_tokens
        ),
        seconds_since_prefill=since,
    )

"""KvTransferService: between the wire and the sender. Block bytes never pass through protobuf."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from engine.transfer.block_io import Bytes
from engine.transfer.checksum import checksum
from engine.transfer.frames import KEY_BYTES, ZERO_KEY, BlockFrame, encode_frame
from engine.transfer.negotiate import boot_id, common_planes
from engine.transfer.plane import Plane, block_bytes, plane_of
from engine.transfer.pool_server import PoolServer, RingLease
from pagewire.errors import FailedPrecondition, InvalidArgument
from pagewire.v1 import transfer_pb2
from pagewire.worker_view import WorkerDescription
from pagewire.worker_view_wire import fingerprint_from_proto
from pagewire.worker_wire import token_to_proto
from transfer_svc.lender import Lender
from transfer_svc.on_host import Staging, on_host
from transfer_svc.sender import BlockRun, KvSender
from transfer_svc.ticket import ManifestBlock, PrefillResult

SERVICE_NAME = "pagewire.v1.KvTransferService"
FRAME_BYTES = 1 << 20
# Trailing metadata of Pull: milliseconds from the end of prefill to the end of the pull. The receiver tells by it
# which blocks came while prefill still ran.
SINCE_PREFILL = "pagewire-ms-since-prefill"
_Context = grpc.aio.ServicerContext[Any, Any]


class KvTransferServicer:
    """Served to other workers. `Pull` yields serialized messages: register it by `add_to_server`."""

    def __init__(
        self,
        sender: KvSender,
        lender: Lender,
        pool_server: PoolServer,
        description: WorkerDescription,
        allowed_planes: Sequence[Plane],
        staging: Staging | None = None,
    ) -> None:
        """`staging`: for a pool in device memory."""
        self._sender = sender
        self._lender = lender
        self._pool_server = pool_server
        self._description = description
        self._allowed_planes = tuple(allowed_planes)
        self._staging = staging
        self._closed = asyncio.Event()

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: _Context
    ) -> transfer_pb2.HandshakeResponse:
        mine, theirs = self._description.fingerprint, fingerprint_from_proto(request.fingerprint)
        if not mine.fits(theirs):
            raise FailedPrecondition(
                f"KV does not fit: sender {self._description.worker_id} has {mine}, "
                f"receiver {request.worker_id} has {theirs}",
                reason="FINGERPRINT_MISMATCH",
                metadata={"sender": str(mine), "receiver": str(theirs)},
            )
        wanted = [plane for number in request.planes if (plane := plane_of(number)) is not None]
        planes = common_planes(
            wanted,
            self._pool_server.planes,
            same_host=bool(request.boot_id) and request.boot_id == boot_id(),
            allowed=self._allowed_planes,
        )
        info = self._pool_server.info
        return transfer_pb2.HandshakeResponse(
            incarnation=self._description.incarnation,
            planes=[_plane_to_proto(plane) for plane in planes],
            shared_pool=transfer_pb2.SharedPool(
                pid=info.pid,
                pool_address=info.pool_address,
                generations_address=info.generations_address,
                pool_bytes=info.pool_bytes,
                socket_name=info.socket_name,
                token=info.token,
                token_address=info.token_address,
                nixl_metadata=info.nixl_metadata,
                tcp_port=info.tcp_port,
                tcp_secret=info.tcp_secret,
            ),
        )

    async def Attach(self, request: transfer_pb2.AttachRequest, context: _Context) -> transfer_pb2.AttachResponse:
        ticket = self._sender.attach(request.ticket, f"{request.worker_id}/{request.incarnation}")
        return transfer_pb2.AttachResponse(
            epoch=ticket.epoch,
            lease_ms=round(ticket.lease_seconds * 1000),
            num_tokens=ticket.num_tokens,
            num_cached_tokens=ticket.num_cached_tokens,
        )

    async def AttachPrefix(
        self, request: transfer_pb2.AttachPrefixRequest, context: _Context
    ) -> transfer_pb2.AttachPrefixResponse:
        block_size, num_keys = self._description.fingerprint.block_size, len(request.keys) // KEY_BYTES
        if not num_keys or len(request.keys) % KEY_BYTES:
            raise InvalidArgument("keys", len(request.keys), f"must be one or more keys of {KEY_BYTES} bytes")
        if len(request.token_ids) != num_keys * block_size:
            limit = f"must be {num_keys * block_size}, {block_size} for each of the {num_keys} keys"
            raise InvalidArgument("token_ids", len(request.token_ids), limit)
        if request.first_block >= num_keys:
            raise InvalidArgument("first_block", request.first_block, f"must be below {num_keys}, the number of keys")
        keys = [request.keys[i : i + KEY_BYTES] for i in range(0, len(request.keys), KEY_BYTES)]
        holder = f"{request.worker_id}/{request.incarnation}"
        ticket = await self._lender.lend(holder, keys, request.token_ids, request.first_block, always=request.always)
        return transfer_pb2.AttachPrefixResponse(
            ticket=ticket.name,
            epoch=ticket.epoch,
            lease_ms=round(ticket.lease_seconds * 1000),
            num_blocks=ticket.num_tokens // block_size,
        )

    async def Pull(self, request: transfer_pb2.PullRequest, context: _Context) -> AsyncIterator[bytes]:
        if request.group != 0:
            raise InvalidArgument("group", request.group, "must be 0: a pull brings all KV groups")
        plane = plane_of(request.plane)
        if plane not in self._allowed_planes or plane not in self._pool_server.planes:
            raise InvalidArgument("plane", request.plane, "must be one of those of the handshake")
        ring = self._pool_server.open_ring_lease() if plane is Plane.SHM_RING else None
        try:
            async with aclosing(
                self._sender.pull(request.ticket, request.epoch, request.first_block, request.first_blocks)
            ) as events:
                async for event in events:
                    if isinstance(event, PrefillResult):
                        if ring is not None:
                            await ring.wait_until_read()
                        context.set_trailing_metadata(((SINCE_PREFILL, self._sender.since(event.ended_at)),))
                        yield _end_message(event)
                    elif plane is Plane.GRPC or ring is not None:
                        async with aclosing(self._bytes_of(request, event, ring)) as messages:
                            async for message in messages:
                                yield message
                                self._sender.check(request.ticket, request.epoch)
                    else:
                        async with aclosing(self._on_host(request, event)) as parts:
                            async for part, _ in parts:
                                placed = [(block.block_id, block.generation, block) for block in part.blocks]
                                yield _ready_message(request, part, part.first_block, placed)
        finally:
            if ring is not None:
                ring.close()

    async def Heartbeat(
        self, request: transfer_pb2.HeartbeatRequest, context: _Context
    ) -> transfer_pb2.HeartbeatResponse:
        return transfer_pb2.HeartbeatResponse(
            refused=self._sender.heartbeat((held.ticket, held.epoch) for held in request.tickets)
        )

    async def Release(self, request: transfer_pb2.ReleaseRequest, context: _Context) -> transfer_pb2.ReleaseResponse:
        return transfer_pb2.ReleaseResponse(released=self._sender.release(request.ticket, request.epoch))

    async def Hold(
        self, request: transfer_pb2.HoldRequest, context: _Context
    ) -> AsyncIterator[transfer_pb2.HoldResponse]:
        with self._sender.presence(f"{request.worker_id}/{request.incarnation}"):
            yield transfer_pb2.HoldResponse()
            await self._closed.wait()

    def close(self) -> None:
        """Ends the streams that would not end by themselves; the process is about to stop."""
        self._closed.set()

    async def _bytes_of(
        self, request: transfer_pb2.PullRequest, run: BlockRun, ring: RingLease | None
    ) -> AsyncGenerator[bytes, None]:
        """The run in frames, or by way of the ring."""
        async with aclosing(self._on_host(request, run)) as parts:
            async for part, rows in parts:
                if ring is None:
                    for message in self._frames(request, part, rows):
                        yield message
                    continue
                async with aclosing(self._through_ring(request, part, rows, ring)) as messages:
                    async for message in messages:
                        yield message

    def _on_host(
        self, request: transfer_pb2.PullRequest, run: BlockRun
    ) -> AsyncGenerator[tuple[BlockRun, Sequence[Bytes]], None]:
        check = partial(self._sender.check, request.ticket, request.epoch)
        return on_host(self._pool_server.pool, self._staging, run, check)

    def _frames(self, request: transfer_pb2.PullRequest, run: BlockRun, rows: Sequence[Bytes]) -> Iterator[bytes]:
        """Whole blocks, as many as fit into a frame; a block that does not fit comes in parts with their checksums."""
        size = block_bytes(self._pool_server.pool)
        per_frame = FRAME_BYTES // size
        if per_frame == 0:
            for i, (block, row) in enumerate(zip(run.blocks, rows, strict=True)):
                for offset in range(0, size, FRAME_BYTES):
                    part = row[offset : offset + FRAME_BYTES].data
                    frame = _frame(request, run, run.first_block + i, [(checksum(part), block)], offset)
                    yield encode_frame(frame, [part])
        else:
            for start in range(0, len(run.blocks), per_frame):
                some = run.blocks[start : start + per_frame]
                frame = _frame(request, run, run.first_block + start, [(block.checksum, block) for block in some])
                yield encode_frame(frame, [row.data for row in rows[start : start + per_frame]])

    async def _through_ring(
        self, request: transfer_pb2.PullRequest, run: BlockRun, rows: Sequence[Bytes], ring: RingLease
    ) -> AsyncGenerator[bytes, None]:
        """Copies blocks into free slots; says what is there before it waits for more room."""
        first, placed = run.first_block, list[tuple[int, int, ManifestBlock]]()
        for block, row in zip(run.blocks, rows, strict=True):
            if not ring.has_free_slot:
                if placed:
                    yield _ready_message(request, run, first, placed)
                    first, placed = first + len(placed), []
                await ring.wait_for_slot()
                self._sender.check(request.ticket, request.epoch)
            placed.append((*ring.put(row), block))
        if placed:
            yield _ready_message(request, run, first, placed)


def add_to_server(servicer: KvTransferServicer, server: grpc.aio.Server) -> None:
    """As the generated function does, but `Pull` responds with bytes that are serialized already."""
    pb = transfer_pb2
    unary: dict[str, tuple[Any, Any, Any]] = {
        "Handshake": (servicer.Handshake, pb.HandshakeRequest.FromString, pb.HandshakeResponse.SerializeToString),
        "Attach": (servicer.Attach, pb.AttachRequest.FromString, pb.AttachResponse.SerializeToString),
        "AttachPrefix": (
            servicer.AttachPrefix,
            pb.AttachPrefixRequest.FromString,
            pb.AttachPrefixResponse.SerializeToString,
        ),
        "Heartbeat": (servicer.Heartbeat, pb.HeartbeatRequest.FromString, pb.HeartbeatResponse.SerializeToString),
        "Release": (servicer.Release, pb.ReleaseRequest.FromString, pb.ReleaseResponse.SerializeToString),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(behaviour, deserialize, serialize)
        for name, (behaviour, deserialize, serialize) in unary.items()
    }
    handlers["Pull"] = grpc.unary_stream_rpc_method_handler(servicer.Pull, pb.PullRequest.FromString, None)
    handlers["Hold"] = grpc.unary_stream_rpc_method_handler(
        servicer.Hold, pb.HoldRequest.FromString, pb.HoldResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _frame(
    request: transfer_pb2.PullRequest,
    run: BlockRun,
    first_block: int,
    blocks: list[tuple[int, ManifestBlock]],
    offset: int = 0,
) -> BlockFrame:
    return BlockFrame(
        ticket=request.ticket,
        epoch=request.epoch,
        first_block=first_block,
        checksums=tuple(digest for digest, _ in blocks),
        keys=tuple(block.key or ZERO_KEY for _, block in blocks),
        payload=b"",
        offset=offset,
        group=run.group,
    )


def _ready_message(
    request: transfer_pb2.PullRequest, run: BlockRun, first_block: int, placed: list[tuple[int, int, ManifestBlock]]
) -> bytes:
    ready = transfer_pb2.BlocksReady(
        ticket=request.ticket,
        epoch=request.epoch,
        group=run.group,
        first_block=first_block,
        blocks=[
            transfer_pb2.BlockDescriptor(slot=slot, generation=generation, checksum=block.checksum, key=block.key)
            for slot, generation, block in placed
        ],
    )
    return transfer_pb2.PullResponse(ready=ready).SerializeToString()


def _end_message(result: PrefillResult) -> bytes:
    end = transfer_pb2.PullEnd(
        num_tokens=result.num_tokens,
        num_cached_tokens=result.num_cached_tokens,
        first_tokens=[token_to_proto(token) for token in result.first_tokens],
    )
    return transfer_pb2.PullResponse(end=end).SerializeToString()


def _plane_to_proto(plane: Plane) -> transfer_pb2.TransferPlane.ValueType:
    return transfer_pb2.TransferPlane.ValueType(plane.value)

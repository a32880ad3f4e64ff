"""One Pull from a peer into a verified prefix."""

from contextlib import aclosing

from engine.transfer.frames import BlockFrame, FrameError
from transfer_svc.client import PulledEnd
from transfer_svc.peer import Peer
from transfer_svc.prefix import VerifiedPrefix
from transfer_svc.reservations import Reservation


async def pull_into(prefix: VerifiedPrefix, peer: Peer, ticket: bytes, epoch: int, mine: Reservation) -> PulledEnd:
    """Pulls what the prefix lacks, on the peer's plane of this moment; await it in `mine.preemptible()`.

    Raises what planes, frames, reservations and the peer raise; the blocks that have come by then stay.
    """
    plane, receiver = peer.plane, peer.receiver
    first_block, *first_blocks = prefix.next_blocks
    async with aclosing(peer.client.pull(ticket, epoch, first_block, plane, first_blocks)) as events:
        async for event in events:
            if isinstance(event, PulledEnd):
                prefix.check_is_whole(event)
                return event
            if isinstance(event, BlockFrame):
                await prefix.take_frame(event, mine)
            elif receiver is None:
                raise FrameError(f"block descriptors on plane {plane.name}")
            else:
                await prefix.take_ready(event, receiver, peer.turns, mine)
    raise FrameError("the pull ended without its end")

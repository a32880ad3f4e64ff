"""One of the ranks but the first: a process that computes its part of every step. `python -m engine.parallel.rank`.

It is told where rank 0 listens through its environment, and everything else by rank 0. It lives as long as its
connection: a thread reads it, so that the process also ends when it waits in the middle of a step.
"""

import logging
import os
import queue
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import EngineError
from engine.parallel.messages import Failed, Forward, Join, Load, Loaded, Logits, Stop, receive, send

ADDRESS = "PAGEWIRE_RANK_ADDRESS"
TOKEN_BYTES = 32

logger = logging.getLogger(__name__)


def run_rank(address: str, token: bytes, rank: int) -> None:
    """Serves rank 0, which listens at the abstract Unix socket `address`, until it says stop.

    If rank 0 ends otherwise, so does this process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connecting:
        connecting.connect("\0" + address)
        connecting.sendall(token + rank.to_bytes(4, "little") + os.getpid().to_bytes(4, "little"))
        connection: Connection[Any, Any] = Connection(connecting.detach())
    try:
        _serve(connection, rank)
    except EngineError as error:
        _give_up(connection, Failed(str(error), is_expected=True))
    except Exception as error:
        logger.exception("rank %d can't go on", rank)
        _give_up(connection, Failed(f"{error!r}\n{traceback.format_exc()}", is_expected=False))


def _give_up(connection: "Connection[Any, Any]", failed: Failed) -> None:
    try:
        send(connection, failed)
    finally:
        os._exit(1)  # threads of kernels and of the group would be waited for


def _serve(connection: "Connection[Any, Any]", rank: int) -> None:
    from engine.parallel.part import Part  # here: whoever starts ranks needs none of it

    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), name="rank-messages", daemon=True).start()
    load: Load = messages.get()
    _set_up_log(rank, load.log_level)
    part = Part.load(load, rank)
    send(connection, Loaded())
    part.join(*messages.get())
    while True:
        message = messages.get()
        if isinstance(message, Forward):
            part.forward(message)
        elif isinstance(message, Logits):
            part.logits(message)
        elif isinstance(message, Stop):
            return
        else:
            raise TypeError(f"a message of type {type(message).__name__} is not known")


def _read(connection: "Connection[Any, Any]", messages: "queue.SimpleQueue[Any]") -> None:
    """Joining comes with the descriptor that is sent beside it."""
    try:
        while True:
            message = receive(connection)
            messages.put((message, _receive_descriptor(connection)) if isinstance(message, Join) else message)
            if isinstance(message, Stop):
                return
    except (EOFError, OSError):
        os._exit(0)  # rank 0 has ended


def _receive_descriptor(connection: "Connection[Any, Any]") -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        _, descriptors, _, _ = socket.recv_fds(own, 1, 1)
    return descriptors[0]


def _set_up_log(rank: int, level: int) -> None:
    """On stderr, which is rank 0's."""
    form = f"%(asctime)s %(levelname)s rank {rank}: %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form)


def main() -> None:
    address, token, rank = os.environ.pop(ADDRESS).split(":")
    run_rank(address, bytes.fromhex(token), int(rank))
    os._exit(0)  # the interpreter would look through all of torch once more before it ends


if __name__ == "__main__":
    main()

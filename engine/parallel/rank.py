"""One of the ranks but the first: a process that computes its part of every step. `python -m engine.parallel.rank`.

It inherits its connection to rank 0 (its environment says which descriptor that is) and is told everything else there.
It lives as long as its connection: a thread reads it, so that the process also ends when it waits in the middle of a
step.
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
from engine.parallel.connection import socket_of
from engine.parallel.messages import Failed, Forward, Join, Load, Logits, PutAdapter, PutBlocks, Stop, decode, send

INHERITED = "PAGEWIRE_RANK_SOCKET"
"""In a rank's environment: `descriptor:rank`."""

logger = logging.getLogger(__name__)


def run_rank(to_rank_0: socket.socket, rank: int) -> None:
    """Serves rank 0 until it says stop. If rank 0 ends otherwise, so does this process.

    What comes from there is unpickled: the caller knows that it is a process of this user.
    """
    connection: Connection[Any, Any] = Connection(to_rank_0.detach())
    try:
        _serve(connection, rank)
    except EngineError as error:
        _give_up(connection, Failed(str(error), is_expected=True))
    except Exception as error:
        logger.exception("rank %d can't go on", rank)
        _give_up(connection, _unexpected(error))


def _unexpected(error: Exception) -> Failed:
    return Failed(f"{error!r}\n{traceback.format_exc()}", is_expected=False)


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
    send(connection, part.loaded())
    join, descriptors = messages.get()
    part.join(join, descriptors, _own_host(connection))
    while True:
        message = messages.get()
        if isinstance(message, Forward):
            part.forward(message)
        elif isinstance(message, Logits):
            part.logits(message)
        elif isinstance(message, PutBlocks):
            part.put_blocks(message)
        elif isinstance(message, PutAdapter):
            part.put(message)
        elif isinstance(message, Stop):
            return
        else:
            raise TypeError(f"a message of type {type(message).__name__} is not known")


def _read(connection: "Connection[Any, Any]", messages: "queue.SimpleQueue[Any]") -> None:
    """Joining comes with the descriptors that are sent beside it. A message that can't be read ends the process too:
    without this thread it would wait for the next one for ever.
    """
    try:
        while True:
            try:
                data = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # rank 0 has ended
            message = decode(data)
            if isinstance(message, Join):
                messages.put((message, _receive_descriptors(connection) if message.has_descriptors else []))
            else:
                messages.put(message)
            if isinstance(message, Stop):
                return
    except Exception as error:
        logger.exception("a message of rank 0 can't be read")
        _give_up(connection, _unexpected(error))


def _receive_descriptors(connection: "Connection[Any, Any]") -> list[int]:
    """At most two."""
    with socket_of(connection) as own:
        _, descriptors, _, _ = socket.recv_fds(own, 1, 2)
    return list(descriptors)


def _own_host(connection: "Connection[Any, Any]") -> str | None:
    """This machine's address for the others; None if rank 0 is on it too."""
    with socket_of(connection) as own:
        return None if own.family == socket.AF_UNIX else str(own.getsockname()[0])


def _set_up_log(rank: int, level: int) -> None:
    """On stderr, which is rank 0's."""
    form = f"%(asctime)s %(levelname)s rank {rank}: %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form)


def main() -> None:
    descriptor, rank = map(int, os.environ.pop(INHERITED).split(":"))
    run_rank(socket.socket(fileno=descriptor), rank)
    os._exit(0)  # the interpreter would look through all of torch once more before it ends


if __name__ == "__main__":
    main()

"""The prefill side of a request's life: the stream that runs, and the ticket that it leaves for decode."""

import asyncio

from router.placement import Worker
from router.prefill_client import PrefillListener, prefill, release_ticket
from router.request import TransferSource, WorkerCall
from router.services import Services


class PrefillRun:
    """One prefill at one worker; `start` once. Without `hand_off` there is no ticket.

    `stop` and `release_ticket` together leave nothing on the worker, whatever the router has heard of it.
    """

    def __init__(self, services: Services, worker: Worker, call: WorkerCall, *, hand_off: bool) -> None:
        self.worker = worker
        self.is_continuation = bool(call.choices)
        self._services = services
        self._call = call
        self._hand_off = hand_off
        self._task: asyncio.Task[None] | None = None
        # Names the ticket that may have been made but was not seen yet.
        self._unseen_ticket_of = call.request_id if hand_off else ""
        # Set when the worker accepts, unset when it is used up (decode has brought a token) or released.
        self.ticket: TransferSource | None = None
        self._num_uses = 0

    def start(self, listener: PrefillListener) -> None:
        """`listener` is told of its course; it says `accepted`, `refused` and `done` to this run."""
        work = prefill(self._services.placer.channel(self.worker), self._call, listener, hand_off=self._hand_off)
        self._task = asyncio.get_running_loop().create_task(work, name="prefill")

    @property
    def is_running(self) -> bool:
        """Its first tokens are still to come."""
        return self._task is not None

    def accepted(self, ticket: bytes) -> None:
        self._unseen_ticket_of = ""
        if ticket:
            self.ticket = TransferSource(self.worker.endpoint, self.worker.worker_id, self.worker.incarnation, ticket)

    def refused(self) -> None:
        """So there is no ticket that was not seen."""
        self._unseen_ticket_of = ""

    def done(self) -> None:
        """All first tokens are there; the stream may end by itself."""
        if self._task is not None:
            self._services.keep(self._task)
            self._task = None

    @property
    def can_reuse_ticket(self) -> bool:
        """Once, since it may be the ticket's fault that decode failed."""
        return self.ticket is not None and self._num_uses < 2 and self._services.placer.is_alive(self.worker)

    def use_ticket(self) -> TransferSource:
        """For one attempt at decoding; there must be one."""
        if self.ticket is None:
            raise RuntimeError("there is no ticket to use")
        self._num_uses += 1
        return self.ticket

    def release_ticket(self) -> None:
        """In the background. Idempotent."""
        source, self.ticket = self.ticket, None
        if source is not None:
            self._services.spawn(release_ticket(self._services.placer.channel(self.worker), source.ticket))

    async def stop(self) -> None:
        """Ends the stream. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # The worker may have been done, and its lease begun, before it heard of the cancellation.
        request_id, self._unseen_ticket_of = self._unseen_ticket_of, ""
        if request_id:
            self._services.spawn(release_ticket(self._services.placer.channel(self.worker), b"", request_id))

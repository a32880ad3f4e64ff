"""VllmEngine as both workers answer it: what they are, how busy, what their caches hold. Generate is each role's."""

from pagewire.errors import InvalidArgument
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.vllm_engine.call import Call, call_from_proto
from pagewire.vllm_engine.facade import VllmEngineFacade
from pagewire.vllm_engine.kv_stream import Journal, KvEventStreams
from pagewire.vllm_engine.load import Limits, Load
from pagewire.vllm_engine.model_card import ModelCard
from pagewire.wire import validate_sampling
from pagewire.worker_view import WorkerView

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class WorkerVllmEngine(VllmEngineFacade):
    """`close` ends the streams that would never end by themselves."""

    def __init__(self, worker: WorkerView, journal: Journal, card: ModelCard) -> None:
        super().__init__(card)
        self._view = worker
        self._kv_events = KvEventStreams(journal, worker.wait_for_change, self.load)

    def close(self) -> None:
        self._kv_events.close()

    def kv_events(self) -> KvEventStreams:
        return self._kv_events

    # --- what the process is ---

    def load(self) -> Load:
        description, load = self._view.description, self._view.load()
        block_size = description.fingerprint.block_size
        return Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_queued_tokens,
            num_used_tokens=(description.num_blocks - load.num_free_blocks) * block_size,
            num_pool_tokens=description.num_blocks * block_size,
            max_running=description.max_num_seqs,
        )

    def limits(self) -> Limits:
        return Limits(self._view.description.max_model_len, self._view.description.vocab_size)

    def problem(self) -> str:
        return "the worker is draining" if self._view.load().draining else ""

    def server_info(self) -> pb.GetServerInfoResponse:
        """Two workers can be paired if their fingerprints agree: that is what `pairing_protocol` says.

        "NixlConnector" is the gateway's word for "the prefill worker's answer says where its KV is".
        """
        description, fingerprint = self._view.description, self._view.description.fingerprint
        return pb.GetServerInfoResponse(
            kv_connector="NixlConnector",
            kv_role=_KV_ROLES[description.role],
            kv_engine_id=f"{description.worker_id}-{description.incarnation:x}",
            block_size=fingerprint.block_size,
            pairing_protocol=f"pagewire:{fingerprint.root.hex()[:16]}:{fingerprint.layout_id}",
        )

    async def flush(self) -> int:
        return await self._view.reset_prefix_cache()

    def _call(self, request: pb.GenerateRequest) -> tuple[Call, tuple[int, ...]]:
        """The call and its prompt's tokens, checked as a router checks them. Raises InvalidArgument."""
        self._note_request()
        call = call_from_proto(request)
        if isinstance(call.prompt, str):
            limit = "is for routers: behind them there are token ids alone; use tokenized.input_ids"
            raise InvalidArgument("text", None, limit)
        limits = self.limits()
        prompt = call.truncated(call.prompt, limits.max_model_len)
        _check_prompt(prompt, limits)
        validate_sampling(call.sampling, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        return call, prompt


def _check_prompt(prompt: tuple[int, ...], limits: Limits) -> None:
    field = "tokenized.input_ids"
    if not prompt:
        raise InvalidArgument(field, None, "must have at least one token id")
    if len(prompt) >= limits.max_model_len:
        limit = f"has {len(prompt)} tokens, at most {limits.max_model_len - 1} fit"
        raise InvalidArgument(field, None, limit)
    if max(prompt) >= limits.vocab_size:
        limit = f"must be below the vocabulary size of {limits.vocab_size}"
        raise InvalidArgument(field, max(prompt), limit)

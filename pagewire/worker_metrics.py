"""A worker's Prometheus metrics: its engine, its pool, its transfers."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from pagewire.metrics import LABELS, OfModel, rejected_counter


class WorkerMetrics:
    """What a prefill or decode worker knows of its engine, its pool and its transfers."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = OfModel(registry, model_name)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.num_requests_running = gauge("vllm:num_requests_running", "Sequences that take part in steps.")
        self.num_requests_waiting = gauge("vllm:num_requests_waiting", "Requests that wait.")
        # The second name is that of older vLLMs, which gateways still ask for.
        self._kv_cache_usage = [
            gauge(name, "Share of blocks that are referenced, 0 … 1.")
            for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        ]
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "1; the labels say how large the cache is.",
            (*LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=registry,
        )
        self._lora_requests = Gauge(
            "vllm:lora_requests_info",
            "When it was so; the labels name the adapters of running and waiting requests.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=registry,
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that have begun.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sampled.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.num_preemptions = counter("vllm:num_preemptions", "Sequences whose blocks were taken back.")
        self.spec_decode_num_drafts = counter("vllm:spec_decode_num_drafts", "Drafts that were checked.")
        self.spec_decode_num_draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens in drafts.")
        self.spec_decode_num_accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that the model drew too."
        )
        self.step_seconds = histogram("pagewire:step_seconds", "Duration of engine steps.")
        self.prefill_tokens_on_decode = counter(
            "pagewire:prefill_tokens_on_decode", "Prompt tokens that a decode worker computed by itself."
        )
        self.transfer_bytes = counter("pagewire:transfer_bytes", "KV bytes received.")
        self.transfer_blocks = counter("pagewire:transfer_blocks", "KV blocks received and verified.")
        self.transfer_overlap_blocks = counter(
            "pagewire:transfer_overlap_blocks", "KV blocks received while their prefill was still running."
        )
        self.transfer_seconds = histogram("pagewire:transfer_seconds", "Attach to end of a pull.")
        self._transfer_failures = Counter(
            "pagewire:transfer_failures", "Pulls that failed, by reason.", (*LABELS, "reason"), registry=registry
        )
        self.transfer_retries = counter("pagewire:transfer_retries", "Pulls that were started over after a failure.")
        self.transfers_failed = counter(
            "pagewire:transfers_failed",
            "Requests given back because their KV did not come (kv-load-failure-policy fail).",
        )
        self.recomputed_tokens = counter(
            "pagewire:recomputed_tokens", "Prompt tokens computed on decode because their transfer had failed."
        )
        self._rejected = rejected_counter(registry)
        self.requests_cancelled = counter("pagewire:requests_cancelled", "Requests given up before their end.")
        self.deadlines_exceeded = counter("pagewire:deadlines_exceeded", "Requests whose time was over on this worker.")
        self.num_tickets = gauge("pagewire:num_tickets", "Tickets that exist.")
        self._tier_blocks = Gauge(
            "pagewire:kv_tier_blocks",
            "KV blocks below the pool, by tier; the store's are all workers'.",
            (*LABELS, "tier"),
            registry=registry,
        )
        self._tier_events = Counter(
            "pagewire:kv_tier_events",
            "Blocks of a tier: stored, evicted, lost (gone before they were written back), failed (to be written) or "
            "corrupt; declined: computing was cheaper than loading. Of the store failed counts questions, late loads.",
            (*LABELS, "tier", "event"),
            registry=registry,
        )
        self.num_held_blocks = gauge("pagewire:num_held_blocks", "Blocks held for transfers.")
        self.leases_expired = counter("pagewire:leases_expired", "Tickets whose lease ran out.")
        self.leases_revoked = counter("pagewire:leases_revoked", "Tickets revoked after max_hold under pressure.")
        self.leases_deserted = counter("pagewire:leases_deserted", "Tickets whose holder's connection broke for good.")
        self._model_name = model_name

    def cache_config(self, *, block_size: int, num_blocks: int, enable_caching: bool) -> None:
        """Told once: what schedulers outside turn shares into tokens by. (Blocks are vLLM's "GPU blocks" anywhere.)"""
        self._cache_config.labels(self._model_name, block_size, num_blocks, enable_caching).set(1)

    def lora_requests_info(self, max_loras: int, running: Sequence[str], waiting: Sequence[str]) -> None:
        """Replaces what was said before, so that old names do not pile up."""
        self._lora_requests.clear()
        self._lora_requests.labels(max_loras, ",".join(running), ",".join(waiting)).set_to_current_time()

    def kv_cache_usage(self, share: float) -> None:
        """Share of blocks that are referenced, 0 … 1."""
        for gauge in self._kv_cache_usage:
            gauge.set(share)

    def tier(self, name: str, num_blocks: int, new_events: Mapping[str, int]) -> None:
        """What a tier holds now, and what has happened in it since the last call."""
        self._tier_blocks.labels(self._model_name, name).set(num_blocks)
        for event, num in new_events.items():
            self._tier_events.labels(self._model_name, name, event).inc(num)

    def transfer_failure(self, reason: str) -> None:
        """Counts one failed pull: "checksum", "generation" or "frame" (bytes that were dropped), "peer", "epoch" …"""
        self._transfer_failures.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Counts one request that was refused at once."""
        self._rejected.labels(self._model_name, reason).inc()

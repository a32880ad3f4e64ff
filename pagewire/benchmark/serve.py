"""A whole benchmark in order: connect, make the prompts, warm up, send, sum up, write."""

import asyncio
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewire.benchmark.arrivals import arrival_times, ramp_up_rates, ramp_up_times
from pagewire.benchmark.backend import Backend, SendError, Served
from pagewire.benchmark.datasets import Sample, TokenIds, check_lengths, make_samples
from pagewire.benchmark.load import Load, send
from pagewire.benchmark.options import ServeBenchOptions
from pagewire.benchmark.outcome import Outcome, Run
from pagewire.benchmark.report import write_report
from pagewire.benchmark.result import result_json, result_path, summaries, write_result
from pagewire.benchmark.table import render
from pagewire.config import ConfigError
from pagewire.security import Security
from pagewire.token_progress import token_progress

_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask: `address` of a router (the openai backends take their options'), `model` or "" for the first."""

    address: str
    model: str
    security: Security


async def serve_bench(
    options: ServeBenchOptions, target: Target, goodput: Mapping[str, float], metadata: Mapping[str, str]
) -> Run:
    """Runs, prints the table, writes the files. Ctrl-C ends the sending; what was measured is still reported.

    Raises ConfigError for options that do not fit the model, SendError if nobody answers at all, OSError.
    """
    backend = _backend(options, target)
    try:
        served = await _open(backend, options.ready_check_timeout_sec)
        # Arrivals don't change with the dataset, nor the dataset with the rate.
        for_prompts, for_arrivals = np.random.default_rng(options.seed).spawn(2)
        samples = make_samples(options, _vocabulary(options, served), for_prompts)
        check_lengths(samples, served.max_model_len)
        await _warm_up(backend, samples, options)
        due = _due(len(samples), options, for_arrivals)
        date = datetime.now()
        run = await _measure(backend, options, samples, due.tolist())
    finally:
        await backend.close()
    _tell(options, run, served.model, date, goodput, metadata)
    return run


def _backend(options: ServeBenchOptions, target: Target) -> Backend:
    asked: dict[str, Any] = {**options.sampling, **({"ignore_eos": True} if options.ignores_eos else {})}
    security = target.security
    if options.is_http:
        from pagewire.benchmark.http_backend import HttpBackend

        return HttpBackend(
            options.url, options.path, target.model, asked, token=security.own_token, verify=_verify(security)
        )
    from pagewire.benchmark.grpc_backend import GrpcBackend

    tls = security.tls
    credentials = {"tls_ca": tls.authority, "tls_cert": tls.certificate, "tls_key": tls.private_key}
    return GrpcBackend(target.address, target.model, asked, {**credentials, "token": security.own_token})


def _verify(security: Security) -> Any:
    """As httpx2 takes it; certificates of clients are for gRPC."""
    import ssl

    authority = security.tls.authority
    return True if authority is None else ssl.create_default_context(cadata=authority.decode())


async def _open(backend: Backend, patience_seconds: float) -> Served:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return await backend.open()
        except SendError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


def _vocabulary(options: ServeBenchOptions, served: Served) -> TokenIds:
    """Ids for random prompts: with a tokenizer without special tokens, else what the server says that it has."""
    if options.dataset_name == "custom":
        return np.arange(0)
    if options.tokenizer is None:
        assert served.vocab_size is not None  # the options demand a tokenizer where the server doesn't say
        return np.arange(served.vocab_size)
    from pagewire.text.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer.load(options.tokenizer)
    except TokenizerError as error:
        raise ConfigError(f"tokenizer = {options.tokenizer}: {error}") from None
    num_tokens = min(tokenizer.num_tokens, served.vocab_size or tokenizer.num_tokens)
    return np.setdiff1d(np.arange(num_tokens), list(tokenizer.special_token_ids))


async def _warm_up(backend: Backend, samples: list[Sample], options: ServeBenchOptions) -> None:
    """The first sample, again and again as in vLLM: others would be in the prefix cache when they are measured."""
    for number in range(options.num_warmups):
        outcome = Outcome(0.0, 0.0)
        await send(backend, samples[0], f"{options.request_id_prefix}warmup-{number}", outcome, time.monotonic)
        if not outcome.is_good:
            raise SendError(outcome.code, f"a warm-up request failed: {outcome.error}")


async def _measure(backend: Backend, options: ServeBenchOptions, samples: list[Sample], due: list[float]) -> Run:
    with token_progress(len(samples), shown=not options.disable_tqdm) as progress:
        started = time.perf_counter()
        load = Load(
            backend,
            samples,
            due,
            max_concurrency=options.max_concurrency,
            request_id_prefix=options.request_id_prefix,
            clock=lambda: time.perf_counter() - started,
            on_tokens=progress.tokens,
            on_finished=progress.finished,
        )
        sending = asyncio.ensure_future(load.run())
        with _interrupt_ends(sending):
            await asyncio.wait([sending])
        duration = time.perf_counter() - started
    if not sending.cancelled():
        sending.result()
    return Run(load.outcomes, duration, len(samples) - len(load.outcomes))


@contextmanager
def _interrupt_ends(sending: "asyncio.Future[None]") -> Iterator[None]:
    """The first Ctrl-C ends the sending; a second one, or one outside of it, everything."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def end() -> None:
        sending.cancel()
        signal.signal(signal.SIGINT, before)

    loop.add_signal_handler(signal.SIGINT, end)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def _tell(
    options: ServeBenchOptions,
    run: Run,
    model: str,
    date: datetime,
    goodput: Mapping[str, float],
    metadata: Mapping[str, str],
) -> None:
    result = result_json(options, run, model=model, date=date, goodput=goodput, metadata=metadata)
    found = summaries(options, run)
    print(render(result, found), flush=True)
    path = result_path(options, model, date)
    written: list[Path] = []
    if options.save_result or options.append_result:
        write_result(path, result, detailed=options.save_detailed, append=options.append_result)
        written.append(path)
    if options.report:
        stem = path.with_suffix("") if path.suffix == ".json" else path
        written += write_report(stem, run, result, found, _setup(options, goodput, metadata))
    for file in written:
        print(f"written: {file}", file=sys.stderr)
    for message in dict.fromkeys(f"{o.code}: {o.error}" for o in run.outcomes if o.code):
        print(f"failed: {message}", file=sys.stderr)


def _setup(options: ServeBenchOptions, goodput: Mapping[str, float], metadata: Mapping[str, str]) -> dict[str, str]:
    """What was asked for by name, for the report."""
    given = {name: getattr(options, name) for name in sorted(options.model_fields_set)}
    shown = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in given.items()
    }
    limits = {f"goodput {name}": f"{limit:g} ms" for name, limit in goodput.items() if math.isfinite(limit)}
    return {**shown, **limits, **metadata}


def _due(num: int, options: ServeBenchOptions, random: np.random.Generator) -> NDArray[np.float64]:
    strategy, start, end = options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
    if strategy is None or start is None or end is None:
        return arrival_times(num, options.request_rate, options.burstiness, random)
    return ramp_up_times(ramp_up_rates(num, strategy, start, end), options.burstiness, random)

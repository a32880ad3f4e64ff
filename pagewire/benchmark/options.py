"""Options of `pagewire bench serve`; names, meaning and defaults are those of `vllm bench serve`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pagewire.option import Port, option

BackendName = Literal["pagewire", "pagewire-chat", "openai", "openai-chat"]
DatasetName = Literal["random", "prefix_repetition", "custom"]
RampUp = Literal["linear", "exponential"]
MetricName = Literal["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]

_INPUT_LEN_HINTS: dict[DatasetName, str] = {
    "prefix_repetition": "is for dataset random; use prefix-repetition-prefix-len and prefix-repetition-suffix-len",
    "custom": "is for dataset random; the prompts of a file are as long as they are",
}
_LOAD, _DATA, _SAMPLING = "Load", "Dataset", "Sampling"
_RESULT, _HTTP = "Result", "Connection of openai and openai-chat"


def _parts(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _underscores(value: object) -> object:
    return value.replace("-", "_") if isinstance(value, str) else value


Rate = Annotated[float, Field(gt=0, lt=float("inf"))]
Count = Annotated[int, Field(ge=0)]
Length = Annotated[int, Field(ge=1)]


class ServeBenchOptions(BaseModel):
    """What to send, how fast, and what to say of it. Lengths in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    backend: BackendName = option(
        "pagewire", "Our gRPC, or an OpenAI server; -chat sends messages instead of prompts.", panel=_LOAD
    )
    num_prompts: Length = option(1000, "Requests to send.", panel=_LOAD, metavar="N")
    request_rate: Annotated[float, Field(gt=0)] = option(
        float("inf"), "Requests per second; inf sends all at once.", panel=_LOAD, metavar="R"
    )
    burstiness: Annotated[float, Field(gt=0)] = option(
        1.0, "Shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier.", panel=_LOAD, metavar="B"
    )
    ramp_up_strategy: RampUp | None = option(
        None, "Let the rate grow with each request, instead of request-rate.", panel=_LOAD, shown_default="none"
    )
    ramp_up_start_rps: Rate | None = option(
        None, "Requests per second at its start.", panel=_LOAD, metavar="R", shown_default="none"
    )
    ramp_up_end_rps: Rate | None = option(None, "And at its end.", panel=_LOAD, metavar="R", shown_default="none")
    max_concurrency: Length | None = option(
        None, "Most requests in flight.", panel=_LOAD, metavar="N", shown_default="no limit"
    )
    seed: Count = option(0, "Fixes arrivals and prompts.", panel=_LOAD, metavar="N")
    num_warmups: Count = option(
        0, "Before the clock starts: the first request, so many times.", panel=_LOAD, metavar="N"
    )
    ready_check_timeout_sec: Annotated[float, Field(ge=0, le=86400)] = option(
        0.0, "Wait so long for the system to answer.", panel=_LOAD, metavar="SECONDS"
    )
    request_id_prefix: str = option("bench-", "How the requests' ids begin.", panel=_LOAD, metavar="TEXT")
    disable_tqdm: bool = option(False, "No progress bar.", panel=_LOAD)

    dataset_name: Annotated[DatasetName, BeforeValidator(_underscores)] = option(
        "random", "Where prompts come from.", panel=_DATA
    )
    dataset_path: Path | None = option(
        None, "For custom: a file with one JSON object a line.", panel=_DATA, metavar="FILE", shown_default="none"
    )
    input_len: Length | None = option(
        None, "Sets random-input-len; for dataset random alone.", panel=_DATA, metavar="TOKENS", shown_default="none"
    )
    output_len: Length | None = option(
        None, "Sets the dataset's output length.", panel=_DATA, metavar="TOKENS", shown_default="none"
    )
    random_input_len: Length = option(1024, "Length of a prompt.", panel=_DATA, metavar="TOKENS")
    random_output_len: Length = option(128, "Length of an output.", panel=_DATA, metavar="TOKENS")
    random_range_ratio: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "Lengths are drawn from (1 ± R) of the above.", panel=_DATA, metavar="R"
    )
    random_prefix_len: Count = option(0, "Beginning that all prompts share, on top.", panel=_DATA, metavar="TOKENS")
    prefix_repetition_prefix_len: Length = option(256, "Length of a prefix.", panel=_DATA, metavar="TOKENS")
    prefix_repetition_suffix_len: Length = option(256, "Length of a prompt's own end.", panel=_DATA, metavar="TOKENS")
    prefix_repetition_num_prefixes: Length = option(10, "Different prefixes.", panel=_DATA, metavar="N")
    prefix_repetition_output_len: Length = option(128, "Length of an output.", panel=_DATA, metavar="TOKENS")
    custom_output_len: Annotated[int, Field(ge=-1)] = option(
        256,
        "Length of the output, where a line has no output_tokens; -1 demands that it has.",
        panel=_DATA,
        metavar="TOKENS",
    )
    disable_shuffle: bool = option(False, "Keep the file's order.", panel=_DATA)
    no_oversample: bool = option(False, "Send a short file's prompts once.", panel=_DATA)
    tokenizer: Path | None = option(
        None,
        "Model directory, for token ids without special tokens; openai needs it for random prompts.",
        panel=_DATA,
        metavar="PATH",
        shown_default="none",
    )

    ignore_eos: bool = option(
        False, "Generate the whole output length; the random dataset always does.", panel=_SAMPLING
    )
    temperature: float | None = option(None, "As in generate.", panel=_SAMPLING, metavar="T", shown_default="server's")
    top_p: float | None = option(None, "As in generate.", panel=_SAMPLING, metavar="P", shown_default="server's")
    top_k: int | None = option(None, "As in generate.", panel=_SAMPLING, metavar="K", shown_default="server's")
    min_p: float | None = option(None, "As in generate.", panel=_SAMPLING, metavar="P", shown_default="server's")

    percentile_metrics: Annotated[tuple[MetricName, ...], BeforeValidator(_parts)] = option(
        ("ttft", "tpot", "itl", "e2el"),
        "What to report, with commas; client_queue_time and e2el_including_client_queue too.",
        panel=_RESULT,
        metavar="NAMES",
        shown_default="ttft,tpot,itl,e2el",
    )
    metric_percentiles: Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], BeforeValidator(_parts)] = option(
        (99.0,), "Which percentiles, with commas.", panel=_RESULT, metavar="P,…", shown_default="99"
    )
    save_result: bool = option(False, "Write the result as JSON.", panel=_RESULT)
    save_detailed: bool = option(False, "With every request's times, lengths, text and error.", panel=_RESULT)
    append_result: bool = option(False, "Append a line to the file instead of replacing it.", panel=_RESULT)
    report: bool = option(
        False, "Write a PNG and an HTML page beside the result: distributions and a timeline.", panel=_RESULT
    )
    result_dir: Path = option(Path("."), "Directory of the files.", panel=_RESULT, metavar="DIR")
    result_filename: str | None = option(
        None, "Name of the JSON file.", panel=_RESULT, metavar="NAME", shown_default="made of label, rate, model, date"
    )
    label: str | None = option(None, "Name of this run.", panel=_RESULT, metavar="TEXT", shown_default="the backend")

    base_url: str | None = option(None, "Instead of host and port.", panel=_HTTP, metavar="URL", shown_default="none")
    host: str = option("127.0.0.1", "The server's address.", panel=_HTTP, metavar="HOST")
    port: Port = option(8000, "The server's port.", panel=_HTTP, metavar="PORT")
    endpoint: str | None = option(
        None, "Path of the URL.", panel=_HTTP, metavar="PATH", shown_default="/v1/completions or /v1/chat/completions"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise ValueError(
                f"dataset-path goes with dataset-name custom, and is needed there; got {self.dataset_name}"
            )
        if self.dataset_name != "custom" and self.is_chat:
            raise ValueError(
                f"backend {self.backend} takes messages, and dataset {self.dataset_name} makes token ids: use backend "
                f"{self.backend.removesuffix('-chat')}, or dataset-name custom"
            )
        if self.dataset_name != "custom" and self.is_http and self.tokenizer is None:
            raise ValueError(f"dataset {self.dataset_name} with backend {self.backend} needs --tokenizer PATH")
        if self.input_len is not None and self.dataset_name != "random":
            raise ValueError(f"input-len = {self.input_len}: {_INPUT_LEN_HINTS[self.dataset_name]}")
        self._check_ramp_up()
        given = self.model_fields_set & {"base_url", "host", "port", "endpoint"}
        if given and not self.is_http:
            name = min(given).replace("_", "-")
            raise ValueError(f"--{name} is for the openai backends; {self.backend} takes --target")
        return self

    def _check_ramp_up(self) -> None:
        rates = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if rates != (None, None):
                raise ValueError("ramp-up-start-rps and ramp-up-end-rps go with ramp-up-strategy")
        elif None in rates:
            raise ValueError("ramp-up-strategy needs ramp-up-start-rps and ramp-up-end-rps")
        elif "request_rate" in self.model_fields_set:
            raise ValueError(f"request-rate = {self.request_rate:g}: ramp-up-strategy sets the rate")

    @property
    def is_http(self) -> bool:
        return self.backend.startswith("openai")

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    @property
    def url(self) -> str:
        """Of the HTTP server, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """Of the HTTP endpoint."""
        return self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @property
    def ignores_eos(self) -> bool:
        return self.ignore_eos or self.dataset_name == "random"

    @property
    def sampling(self) -> dict[str, float]:
        """Parameters that were given."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

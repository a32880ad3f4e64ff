"""GenerateRequest to plain data. A zero where there is no presence means the default; what is not served is refused."""

from dataclasses import dataclass
from types import MappingProxyType

from pagewire.errors import InvalidArgument
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.vllm_engine.hand_off import HandOff, hand_off_from_request

# Zero means "as if it were not there", other than in pagewire's own API, where fields have presence.
_ZERO_IS_DEFAULT = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
)
_WITH_PRESENCE = ("temperature", "max_tokens", "logprobs")
_NOT_SERVED = ("mm_inputs", "extra_mm_inputs", "media_refs", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Call:
    """One Generate. `prompt` is text or token ids; `truncate_to` keeps so many of its last tokens (-1: what fits)."""

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    truncate_to: int | None
    stream: bool
    hand_off: HandOff | None

    def truncated(self, token_ids: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
        """The prompt's tokens without those that it is to lose."""
        if self.truncate_to is None:
            return token_ids
        most = max_model_len - 1 if self.truncate_to == -1 else self.truncate_to
        return token_ids[-most:]


def call_from_proto(request: pb.GenerateRequest) -> Call:
    """Raises InvalidArgument for what is not served; ranges are checked by whoever runs it, as for every client."""
    for descriptor, _ in request.ListFields():
        if descriptor.name in _NOT_SERVED:
            raise InvalidArgument(descriptor.name, None, "is not supported")
    if request.data_parallel_rank != 0:
        limit = "must be 0: there is one rank"
        raise InvalidArgument("data_parallel_rank", request.data_parallel_rank, limit)
    params = request.sampling_params
    truncate_to = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    if truncate_to is not None and truncate_to != -1 and truncate_to < 1:
        limit = "must be at least 1, or -1 for as many as fit"
        raise InvalidArgument("sampling_params.truncate_prompt_tokens", truncate_to, limit)
    return Call(
        request_id=request.request_id,
        prompt=_prompt(request),
        sampling=_sampling(params),
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        truncate_to=truncate_to,
        stream=request.stream,
        hand_off=hand_off_from_request(request),
    )


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", None, "is missing: set one of tokenized, text")
    return request.text if kind == "text" else tuple(request.tokenized.input_ids)


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    if params.HasField("prompt_logprobs"):
        raise InvalidArgument("sampling_params.prompt_logprobs", params.prompt_logprobs, "is not supported")
    structure = _structure(params)
    given = {name: value for name in _ZERO_IS_DEFAULT if (value := getattr(params, name))}
    present = {descriptor.name for descriptor, _ in params.ListFields()}
    given |= {name: getattr(params, name) for name in _WITH_PRESENCE if name in present}
    return SamplingParams(
        **given,
        # Its seeds are signed.
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        stop_token_ids=tuple(params.stop_token_ids),
        # A form says by itself where its text may end; gateways set this on their prefill leg whatever was asked for.
        ignore_eos=params.ignore_eos and structure is None,
        structured_output=structure,
    )


def _structure(params: pb.SamplingParams) -> StructuredOutput | None:
    """The form of the text; it holds from the first token on, whatever `grammar_from_first_token` says."""
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return StructuredOutput("json_object") if params.json_object else None
        case "choice":
            return StructuredOutput("choice", choices=tuple(params.choice.choices))
        case "json_schema" | "regex" | "grammar" as kind:
            return StructuredOutput(kind, getattr(params, kind))
        case other:
            raise InvalidArgument(f"sampling_params.{other}", None, "is not supported")

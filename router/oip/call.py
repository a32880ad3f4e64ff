"""One ModelInferRequest as a call of the pipeline. Names and defaults are those of Triton's vLLM backend."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.errors import InvalidArgument
from pagewire.foreign.triton import grpc_service_pb2 as pb
from router.oip.parameters import Parameters, read_parameters
from router.oip.tensors import read_inputs
from router.request import GenerateCall, TextPrompt
from router.service import MAX_LABEL_LENGTH

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


@dataclass(frozen=True, slots=True)
class InferCall:
    """`echo`: the output begins with the input. `raw`: tensors travel as raw bytes, as the request's did."""

    text: str
    parameters: Parameters
    stream: bool
    echo: bool
    outputs: tuple[str, ...]
    raw: bool

    def generate_call(self, request: pb.ModelInferRequest, metadata: Mapping[str, str]) -> GenerateCall:
        """As the pipeline takes it; labels come in the metadata."""
        return GenerateCall(
            prompt=TextPrompt(self.text),
            sampling=self.parameters.sampling,
            text_options=self.parameters.text_options,
            model=request.model_name,
            cache_salt=self.parameters.cache_salt,
            priority=self.parameters.priority,
            truncate_prompt_tokens=self.parameters.truncate_prompt_tokens,
            client_request_id=request.id,
            tenant=metadata.get("x-tenant", "")[:MAX_LABEL_LENGTH],
            traceparent=metadata.get("traceparent", "")[:MAX_LABEL_LENGTH],
            session_id=metadata.get("x-session-id", "")[:MAX_LABEL_LENGTH],
        )


def call_from_proto(request: pb.ModelInferRequest) -> InferCall:
    """Raises InvalidArgument."""
    if request.model_version not in ("", "1"):
        raise InvalidArgument("model_version", request.model_version, "must be 1, or left out")
    inputs = read_inputs(request, INPUTS)
    if "text_input" not in inputs:
        raise InvalidArgument("inputs", None, "must have text_input")
    stream = bool(inputs.get("stream", False))
    excluded = inputs.get("exclude_input_in_output", stream)
    if stream and not excluded:
        raise InvalidArgument("exclude_input_in_output", False, "must be true, or left out, with stream = true")
    return InferCall(
        text=str(inputs["text_input"]),
        parameters=read_parameters(request.parameters, str(inputs.get("sampling_parameters", ""))),
        stream=stream,
        echo=not excluded,
        outputs=_outputs(request, inputs),
        raw=bool(request.raw_input_contents),
    )


def _outputs(request: pb.ModelInferRequest, inputs: dict[str, str | bool]) -> tuple[str, ...]:
    """Those that the request names, or text and finish reason and what its inputs ask for."""
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidArgument("outputs", output.name, f"is none of {', '.join(OUTPUTS)}")
        if "shared_memory_region" in output.parameters:
            raise InvalidArgument(f"outputs[{output.name}].shared_memory_region", None, "is not supported")
    if request.outputs:
        return tuple(dict.fromkeys(output.name for output in request.outputs))
    counts = (name for name in ("num_input_tokens", "num_output_tokens") if inputs.get(f"return_{name}"))
    return ("text_output", "finish_reason", *counts)

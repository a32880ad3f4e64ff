"""NVIDIA's own `tritonclient[grpc]` against a real router: text in, text out, in both of the protocol's forms."""

import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from pagewire import Client
from pagewire.foreign.triton import grpc_service_pb2 as pb
from tests.clients.conftest import Served

PROMPT = "the rain in Spain"


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(served.cluster.target)
    yield client
    client.close()


@pytest.fixture
def grpc(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


def tensor(name: str, value: str | bool) -> triton.InferInput:
    is_flag = isinstance(value, bool)
    made = triton.InferInput(name, [1], "BOOL" if is_flag else "BYTES")
    made.set_data_from_numpy(np.array([value] if is_flag else [value.encode()], dtype=bool if is_flag else np.object_))
    return made


def inputs(text: str = PROMPT, **others: Any) -> list[triton.InferInput]:
    """`sampling` becomes sampling_parameters."""
    sampling = others.pop("sampling", None)
    more = {} if sampling is None else {"sampling_parameters": json.dumps(sampling)}
    return [tensor("text_input", text), *(tensor(name, value) for name, value in (others | more).items())]


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [value.decode() for value in result.as_numpy(name)]


def stream(client: triton.InferenceServerClient, *asked: dict[str, Any]) -> list[Any]:
    """Everything that comes back until each request has had its last response."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    try:
        for request in asked:
            client.async_stream_infer("tiny", **request)
        answers, num_open = [], len(asked)
        while num_open:
            result, error = arrived.get(timeout=30)
            answers.append(error if result is None else result)
            num_open -= result is None or result.get_response().parameters["triton_final_response"].bool_param
        return answers
    finally:
        client.stop_stream()


def test_what_it_serves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "pagewire"
    metadata = client.get_model_metadata("tiny")
    assert {tensor.name for tensor in metadata.inputs} >= {"text_input", "stream", "sampling_parameters"}
    assert {tensor.name for tensor in metadata.outputs} >= {"text_output", "finish_reason"}
    config = client.get_model_config("tiny").config
    assert config.model_transaction_policy.decoupled
    assert [each.name for each in config.input if not each.optional] == ["text_input"]
    with pytest.raises(InferenceServerException, match="not served here"):
        client.get_model_metadata("other")


def test_infer(client: triton.InferenceServerClient, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=12)
    # As Triton's own vLLM backend has it: numbers may be text, the input comes first unless it is excluded.
    result = client.infer("tiny", inputs(sampling={"temperature": "0", "max_tokens": "12"}), request_id="mine")
    assert texts(result) == [PROMPT + wanted.text]
    assert texts(result, "finish_reason") == [wanted.choices[0].finish_reason]
    assert result.get_response().id == "mine"
    result = client.infer(
        "tiny",
        inputs(exclude_input_in_output=True, return_num_input_tokens=True, return_num_output_tokens=True),
        parameters={"max_tokens": 12, "temperature": 0.0},
    )
    assert texts(result) == [wanted.text]
    assert result.as_numpy("num_input_tokens").tolist() == [wanted.usage.prompt_tokens]
    assert result.as_numpy("num_output_tokens").tolist() == [12]
    result = client.infer("tiny", inputs(), outputs=[triton.InferRequestedOutput("finish_reason")])
    assert result.as_numpy("text_output") is None


def test_infer_with_seed_stop_and_choices(client: triton.InferenceServerClient, grpc: Client) -> None:
    sampling = {"seed": 2**63 + 5, "temperature": 0.9, "top_p": 0.9, "max_tokens": 10, "n": 2}
    wanted = grpc.complete(PROMPT, **sampling)
    result = client.infer("tiny", inputs(exclude_input_in_output=True, sampling=sampling))
    assert texts(result) == [choice.text for choice in wanted.choices]
    free = grpc.complete(PROMPT, temperature=0, max_tokens=20, ignore_eos=True).text
    stop = next(a + b for a, b in pairwise(free[3:]) if (a + b).isascii())
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=20, ignore_eos=True, stop=[stop])
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "stop": [stop]}
    result = client.infer("tiny", inputs(exclude_input_in_output=True, sampling=greedy))
    assert (texts(result), texts(result, "finish_reason")) == ([wanted.text], ["stop"])


def test_infer_with_constraints(client: triton.InferenceServerClient, grpc: Client) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    free = grpc.complete(PROMPT, **greedy)
    word = next(char for char in free.text if char.isascii() and char.isalpha())
    for asked in (
        {"allowed_token_ids": [70, 71, 72]},
        {"bad_words": [word]},
        {"bad_words": word, "truncate_prompt_tokens": 4},
        {"truncate_prompt_tokens": -1},
    ):
        ours = asked | ({"bad_words": [word]} if "bad_words" in asked else {})
        wanted = grpc.complete(PROMPT, **greedy, **ours)
        result = client.infer("tiny", inputs(exclude_input_in_output=True, sampling=greedy | asked))
        assert texts(result) == [wanted.text], asked
    for name in ("structured_outputs", "guided_decoding"):
        result = client.infer("tiny", inputs(exclude_input_in_output=True, sampling={name: {"regex": "(ab){2}"}}))
        assert texts(result) == ["abab"]


@pytest.mark.parametrize("with_empty_final", [False, True])
def test_a_stream_brings_the_text_in_parts_and_its_end_last(
    client: triton.InferenceServerClient, grpc: Client, with_empty_final: bool
) -> None:
    """Of so many tokens that a busy machine cannot make one message."""
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=200, ignore_eos=True)
    sampling = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    asked = {"inputs": inputs(stream=True, sampling=sampling), "enable_empty_final_response": with_empty_final}
    results = stream(client, asked)
    if with_empty_final:
        assert not results.pop().get_response().outputs
    assert "".join(texts(result)[0] for result in results) == wanted.text
    assert len(results) > 2
    assert [texts(result, "finish_reason")[0] for result in results] == [""] * (len(results) - 1) + ["length"]


def test_requests_of_one_stream_run_side_by_side(client: triton.InferenceServerClient, grpc: Client) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    wanted = [grpc.complete(prompt, temperature=0, max_tokens=12).text for prompt in prompts]
    sampling = {"temperature": 0, "max_tokens": 12}
    results = stream(
        client,
        *(
            {"inputs": inputs(prompt, stream=True, sampling=sampling), "request_id": str(number)}
            for number, prompt in enumerate(prompts)
        ),
        {"inputs": inputs(stream=True, sampling={"top_p": 2}), "request_id": "bad"},
        {"inputs": inputs(prompts[0], exclude_input_in_output=True, sampling=sampling), "request_id": "whole"},
    )
    errors = [result for result in results if isinstance(result, InferenceServerException)]
    assert [error.message() for error in errors] == ["sampling.top_p = 2.0: must be in (0, 1]"]
    by_id: dict[str, str] = {}
    for result in results:
        if not isinstance(result, InferenceServerException):
            name = result.get_response().id
            by_id[name] = by_id.get(name, "") + texts(result)[0]
    assert by_id == {**{str(number): text for number, text in enumerate(wanted)}, "whole": wanted[0]}


def test_a_client_that_dies_leaves_nothing(served: Served) -> None:
    """In a process of its own; and cancelling a stream leaves one of tritonclient's threads waiting for ever."""
    script = f"""
import time
import numpy as np, tritonclient.grpc as triton
client = triton.InferenceServerClient({served.cluster.target!r})
client.start_stream(callback=lambda result, error: print("more", flush=True))
made = [triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("stream", [1], "BOOL")]
made[0].set_data_from_numpy(np.array([b"the rain"], dtype=object))
made[1].set_data_from_numpy(np.array([True]))
client.async_stream_infer("tiny", made, parameters={{"max_tokens": 200, "ignore_eos": True}})
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "more\n"
        process.kill()
    served.cluster.wait_quiet()


def test_typed_contents_are_answered_in_kind(served: Served, grpc: Client) -> None:
    import grpc as plain

    from pagewire.foreign.triton.grpc_service_pb2_grpc import GRPCInferenceServiceStub

    request = pb.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(PROMPT.encode())
    excluded = request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    excluded.contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = 6
    request.parameters["temperature"].double_param = 0
    with plain.insecure_channel(served.cluster.target) as channel:
        response = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
        with pytest.raises(plain.RpcError) as caught:
            GRPCInferenceServiceStub(channel).RepositoryIndex(pb.RepositoryIndexRequest())
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=6)
    assert not response.raw_output_contents
    assert response.outputs[0].contents.bytes_contents[0].decode() == wanted.text
    assert caught.value.code() is plain.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sampling": {"temprature": 1}}, "parameters = 'temprature': is none of"),
        ({"sampling": {"temperature": "warm"}}, "parameters.temperature = 'warm': must be a number"),
        ({"sampling": {"max_tokens": 1.5}}, "parameters.max_tokens = 1.5: must be a whole number"),
        ({"sampling": [1]}, "sampling_parameters"),
        ({"sampling": {"allowed_token_ids": 5}}, "parameters.allowed_token_ids = 5: must be a list of token ids"),
        ({"sampling": {"bad_words": [5]}}, "parameters.bad_words: must be text"),
        ({"sampling": {"structured_outputs": "a"}}, "parameters.structured_outputs: must be an object"),
        ({"sampling": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "must have one constraint"),
        ({"sampling": {"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}}, "older name"),
        ({"sampling": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens = 0: must be in 1"),
        ({"sampling": {"max_tokens": 4000}}, "sampling.max_tokens = 4000: must be at most"),
        ({"stream": True}, "use ModelStreamInfer"),
        ({"text": ""}, "text = '': must not be empty"),
        ({"nothing": "x"}, "inputs = 'nothing': is none of text_input"),
    ],
)
def test_errors_name_field_and_value(client: triton.InferenceServerClient, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("tiny", inputs(**bad))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert message in caught.value.message()

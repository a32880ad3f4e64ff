"""Tensors of one element in both of the protocol's forms: typed `contents`, or raw bytes beside the request.

Raw, a BYTES element is its length (u32, little endian) and its bytes, a BOOL is one byte.
"""

import struct
from collections.abc import Sequence
from math import prod

from pagewire.errors import InvalidArgument
from pagewire.foreign.triton import grpc_service_pb2 as pb

Value = str | bool
_RAW_FORMATS = {"UINT32": "<I"}


def read_inputs(request: pb.ModelInferRequest, known: dict[str, str]) -> dict[str, Value]:
    """The inputs by name. `known` has the datatype of every input that there is. Raises InvalidArgument."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument("raw_input_contents", len(raw), f"must be as many as inputs, {len(request.inputs)}")
    values: dict[str, Value] = {}
    for number, tensor in enumerate(request.inputs):
        field = f"inputs[{tensor.name}]"
        if tensor.name not in known:
            raise InvalidArgument("inputs", tensor.name, f"is none of {', '.join(known)}")
        if tensor.name in values:
            raise InvalidArgument("inputs", tensor.name, "is there twice")
        if tensor.datatype != known[tensor.name]:
            raise InvalidArgument(f"{field}.datatype", tensor.datatype, f"must be {known[tensor.name]}")
        if prod(tensor.shape) != 1:
            raise InvalidArgument(f"{field}.shape", list(tensor.shape), "must be of one element; send one prompt each")
        if "shared_memory_region" in tensor.parameters:
            raise InvalidArgument(f"{field}.shared_memory_region", None, "is not supported; send the bytes")
        if raw and tensor.HasField("contents"):
            raise InvalidArgument(f"{field}.contents", None, "must not be set beside raw_input_contents")
        if raw:
            values[tensor.name] = _from_raw(field, tensor.datatype, raw[number])
        else:
            values[tensor.name] = _from_contents(field, tensor.datatype, tensor.contents)
    return values


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[str | int], *, raw: bool
) -> None:
    """Appends an output of shape [number of values], BYTES from text or UINT32 from numbers."""
    output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if datatype == "BYTES":
        encoded = [str(value).encode() for value in values]
        if raw:
            response.raw_output_contents.append(b"".join(struct.pack("<I", len(e)) + e for e in encoded))
        else:
            output.contents.bytes_contents.extend(encoded)
        return
    numbers = [int(value) for value in values]
    if raw:
        response.raw_output_contents.append(b"".join(struct.pack(_RAW_FORMATS[datatype], n) for n in numbers))
    else:
        output.contents.uint_contents.extend(numbers)


def _from_raw(field: str, datatype: str, data: bytes) -> Value:
    if datatype == "BOOL":
        if len(data) != 1:
            raise InvalidArgument(field, None, f"has {len(data)} raw bytes, a BOOL has 1")
        return data != b"\x00"
    if len(data) < 4 or struct.unpack_from("<I", data)[0] != len(data) - 4:
        raise InvalidArgument(field, None, "must be one length (u32, little endian) and so many bytes")
    return _text(field, data[4:])


def _from_contents(field: str, datatype: str, contents: pb.InferTensorContents) -> Value:
    values = contents.bool_contents if datatype == "BOOL" else contents.bytes_contents
    if len(values) != 1:
        raise InvalidArgument(f"{field}.contents", len(values), f"must have one {datatype} element")
    (value,) = values
    return value if isinstance(value, bool) else _text(field, value)


def _text(field: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, None, f"must be UTF-8: {error.reason} at byte {error.start}") from None

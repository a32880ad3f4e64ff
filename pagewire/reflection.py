"""Server reflection under both of its names: `grpc.reflection.v1`, and `v1alpha` for clients that are older.

grpcio has the older only. The two differ in their names and in nothing else, so the older's servicer and messages serve
both; the newer's own description is made from the older's.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_METHOD = "ServerReflectionInfo"
SERVICE_NAMES = (f"{_V1}.ServerReflection", reflection.SERVICE_NAME)


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Describes these services and reflection itself."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*service_names, *SERVICE_NAMES))
    for name in SERVICE_NAMES:
        handler: Any = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {_METHOD: handler}),))


def _describe_v1() -> None:
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = file.name.replace("v1alpha", "v1"), _V1
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # set to nothing it would be set
                field.type_name = field.type_name.replace(_ALPHA, _V1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_ALPHA, _V1)
            method.output_type = method.output_type.replace(_ALPHA, _V1)
    try:
        pool.FindFileByName(file.name)  # made before, or brought by somebody's own stubs
    except KeyError:
        pool.AddSerializedFile(file.SerializeToString())

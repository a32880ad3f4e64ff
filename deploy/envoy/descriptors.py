"""Writes the descriptor set that Envoy's JSON transcoder reads. Usage: python descriptors.py OUT.binpb

It comes from the stubs, so it is never older than they are; google.rpc's details let errors be shown as JSON.
"""

import sys
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import inference_pb2


def descriptor_set(*roots: FileDescriptor) -> FileDescriptorSet:
    """The files and all that they import, imports first."""
    result = FileDescriptorSet()
    seen: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for imported in file.dependencies:
            add(imported)
        file.CopyToProto(result.file.add())

    for root in roots:
        add(root)
    return result


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    files = descriptor_set(inference_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)
    Path(sys.argv[1]).write_bytes(files.SerializeToString(deterministic=True))

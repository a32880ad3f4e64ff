"""Hypothesis strategies for any protobuf message: mutations of valid ones, so that they get behind the first check."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 5
MAX_CHANGES = 4  # fields that a mutation sets

_F = FieldDescriptor
_BITS = {
    _F.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    _F.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    _F.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    _F.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_TEXTS = ["", "a", "\x00", "é\u0301", "\U0001f600" * 9, "x" * 300, "{{ 7 * 7 }}", "{", '{"a": 1}', "<bos>", "user"]
# (field name -> values worth trying), whatever the message.
Known = Mapping[str, list[Any]]
Bases = Mapping[str, list[Message]]


def messages(descriptor: Descriptor, bases: Bases, known: Known, depth: int = 0) -> st.SearchStrategy[Message]:
    """A base message of that type (or an empty one) with a few fields set to anything."""
    cls = GetMessageClass(descriptor)
    if depth > MAX_DEPTH or not descriptor.fields:
        return st.builds(cls)
    fields = {field.name: _field(field, bases, known, depth) for field in descriptor.fields}
    changes = st.lists(st.sampled_from(sorted(fields)), max_size=min(MAX_CHANGES, len(fields)), unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    starts = [cls(), *bases.get(descriptor.full_name, ())]
    return st.builds(_change, st.sampled_from(starts), changes)


def _change(base: Message, changes: dict[str, Any]) -> Message:
    message = type(base)()
    message.CopyFrom(base)
    for name, value in changes.items():
        message.ClearField(name)
        message.MergeFrom(type(base)(**{name: value}))
    return message


def _field(field: FieldDescriptor, bases: Bases, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        keys, values = (_single(entry[name], bases, known, depth) for name in ("key", "value"))
        return st.dictionaries(keys, values, max_size=4)
    single = _single(field, bases, known, depth)
    return st.lists(single, max_size=6) if field.is_repeated else single


def _single(field: FieldDescriptor, bases: Bases, known: Known, depth: int) -> st.SearchStrategy[Any]:
    value = _any(field, bases, known, depth)
    if field.name in known:
        return st.sampled_from(known[field.name]) | value
    return value


def _any(field: FieldDescriptor, bases: Bases, known: Known, depth: int) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == _F.CPPTYPE_MESSAGE:
        return messages(field.message_type, bases, known, depth + 1)
    if kind in _BITS:
        low, high = _BITS[kind]
        return st.integers(0, 12) | st.sampled_from([low, high, 299, 300, high // 2]) | st.integers(low, high)
    if kind == _F.CPPTYPE_ENUM:
        return st.sampled_from(list(field.enum_type.values_by_number)) | st.integers(-1, 99)
    if kind == _F.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE):
        return st.floats(0, 2, width=32) | st.floats(width=32)
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=40) | st.binary(min_size=16, max_size=16)
    return st.sampled_from(_TEXTS) | st.text(max_size=12)

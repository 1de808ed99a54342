"""Types in the words of .proto files, from their descriptors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

_SCALARS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in (
        *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes", "uint32"),
        *("sfixed32", "sfixed64", "sint32", "sint64"),
    )
}


def describe(pool: DescriptorPool, symbol: str) -> list[str]:
    """Return the lines of a message, an enum, or a service. Raises KeyError when the pool knows none of that name."""
    with suppress(KeyError):
        message = pool.FindMessageTypeByName(symbol)
        return _block("message", symbol, _fields(message))
    with suppress(KeyError):
        enum = pool.FindEnumTypeByName(symbol)
        return _block("enum", symbol, (f"{value.name} = {value.number}" for value in enum.values))
    return _block("service", symbol, map(signature, pool.FindServiceByName(symbol).methods))


def signature(method: MethodDescriptor) -> str:
    """Return a method as a .proto file declares it."""
    asked = ("stream " if method.client_streaming else "") + method.input_type.full_name
    answered = ("stream " if method.server_streaming else "") + method.output_type.full_name
    return f"rpc {method.name}({asked}) returns ({answered})"


def _block(kind: str, name: str, lines: Iterable[str]) -> list[str]:
    return [f"{kind} {name} {{", *(f"  {line}" for line in lines), "}"]


def _fields(message: Descriptor) -> Iterator[str]:
    oneof = None
    for field in message.fields:
        around = field.containing_oneof if not _is_optional(field) else None
        if around is not oneof:
            if oneof is not None:
                yield "}"
            if around is not None:
                yield f"oneof {around.name} {{"
            oneof = around
        yield ("  " if oneof is not None else "") + _field(field)
    if oneof is not None:
        yield "}"


def _field(field: FieldDescriptor) -> str:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = (_type(entry.fields_by_name[name]) for name in ("key", "value"))
        return f"map<{key}, {value}> {field.name} = {field.number}"
    label = "repeated " if field.is_repeated else "optional " if _is_optional(field) else ""
    return f"{label}{_type(field)} {field.name} = {field.number}"


def _type(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    return str(named.full_name) if named is not None else _SCALARS[field.type]


def _is_optional(field: FieldDescriptor) -> bool:
    """`optional` in proto3 is a oneof of one field, whose name the compiler makes up."""
    oneof = field.containing_oneof
    return oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{field.name}"

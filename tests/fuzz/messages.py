"""Hypothesis strategies for any protobuf message, from its descriptor: valid on the wire, otherwise without mercy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MessageT = TypeVar("MessageT", bound=Message)
_DEPTH: Final = 5
_EDGES_32: Final = [-(2**31), -1, 0, 1, 2, 7, 16, 255, 2**16, 2**31 - 1]
_EDGES_64: Final = [-(2**63), -(2**31) - 1, *_EDGES_32, 2**32, 2**53 + 1, 2**63 - 1]
_WORDS: Final = ["", "a", "\n", "\x00", '{"level":"error"}\r\n', "start: /a/", '{"type":"object"}', "é" * 40, "../" * 9]

_int32 = st.sampled_from(_EDGES_32) | st.integers(-3, 40) | st.integers(-(2**31), 2**31 - 1)
_int64 = st.sampled_from(_EDGES_64) | st.integers(-3, 40) | st.integers(-(2**63), 2**63 - 1)
_uint32 = st.sampled_from([n for n in _EDGES_64 if 0 <= n < 2**32] + [2**32 - 1]) | st.integers(0, 2**32 - 1)
_uint64 = st.sampled_from([n for n in _EDGES_64 if n >= 0] + [2**64 - 2, 2**64 - 1]) | st.integers(0, 2**64 - 1)
_floats = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.0, 1e30])
_texts = st.sampled_from(_WORDS) | st.text(max_size=24)
# Packed arrays of 4-byte ids and of 16-byte hashes, and whatever is neither.
_bytes = (
    st.lists(_uint32, max_size=8).map(lambda ids: b"".join(each.to_bytes(4, "little") for each in ids))
    | st.integers(0, 6).map(lambda count: bytes(range(16)) * count)
    | st.binary(max_size=40)
)

_F = FieldDescriptor
_UNSIGNED: Final = (_F.CPPTYPE_UINT32, _F.CPPTYPE_UINT64)
_SCALARS: Final[dict[int, st.SearchStrategy[Any]]] = {
    _F.CPPTYPE_INT32: _int32,
    _F.CPPTYPE_INT64: _int64,
    _F.CPPTYPE_UINT32: _uint32,
    _F.CPPTYPE_UINT64: _uint64,
    _F.CPPTYPE_DOUBLE: _floats,
    _F.CPPTYPE_FLOAT: _floats,
    _F.CPPTYPE_BOOL: st.booleans(),
    _F.CPPTYPE_ENUM: st.integers(0, 7) | _int32,
}
# Half of all messages have these values where a field has one of these names: nothing behind a check is reached else.
LIKELY: Final[dict[str, st.SearchStrategy[Any]]] = {
    "ids": st.lists(st.integers(3, 200), min_size=1, max_size=40),
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.floats(0.125, 1, width=32),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1, width=32),
    "max_tokens": st.integers(1, 40),
    "min_tokens": st.integers(0, 3),
    "n": st.integers(1, 4),
    "logprobs": st.integers(0, 20),
    "priority": st.integers(-100, 100),
    "repetition_penalty": st.floats(0.5, 2, width=32),
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "logit_bias": st.dictionaries(st.integers(0, 200), st.floats(-100, 100, width=32), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 200), max_size=4),
    "role": st.sampled_from(["user", "system", "assistant"]),
    "seed": st.integers(0, 2**31),
    "traceparent": st.just("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),
    "incarnation": st.binary(min_size=16, max_size=16),
}


def messages(kind: type[MessageT], likely: bool | None = None) -> st.SearchStrategy[MessageT]:
    """Return any message of a class; all of them, half of them or none with `LIKELY` values."""
    descriptor: Any = kind.DESCRIPTOR
    chosen = st.booleans() if likely is None else st.just(likely)
    made = chosen.flatmap(lambda likely: _of(descriptor, _DEPTH, likely))
    return made.map(lambda fill: _filled(kind, fill))


def encoded(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """Return bytes that a client may send for a message: nearly always some message, sometimes broken."""
    whole = messages(kind).map(lambda message: message.SerializeToString())
    return st.integers(0, 15).flatmap(lambda chance: whole if chance else whole.flatmap(_broken))


def _broken(content: bytes) -> st.SearchStrategy[bytes]:
    """Cut, extend or change bytes."""
    places = st.integers(0, len(content))
    return st.one_of(
        places.map(lambda place: content[:place]),
        st.binary(max_size=20).map(lambda more: content + more),
        st.tuples(places, st.binary(min_size=1, max_size=3)).map(
            lambda change: content[: change[0]] + change[1] + content[change[0] + len(change[1]) :]
        ),
    )


Fill = Callable[[Any], None]


def _filled(kind: type[MessageT], fill: Fill) -> MessageT:
    message = kind()
    fill(message)
    return message


def _of(descriptor: Any, depth: int, likely: bool) -> st.SearchStrategy[Fill]:
    """Return functions that fill in a message: of each `oneof` one field, and some of the others."""
    alone = [field for field in descriptor.fields if field.containing_oneof is None]
    parts = [st.none() | _part(field, depth, likely) for field in alone]
    groups = descriptor.oneofs
    parts += [st.one_of(st.none(), *(_part(field, depth, likely) for field in group.fields)) for group in groups]

    def together(fills: tuple[Fill | None, ...]) -> Fill:
        def fill(message: Any) -> None:
            for each in fills:
                if each is not None:
                    each(message)

        return fill

    return st.tuples(*parts).map(together)


def _part(field: Any, depth: int, likely: bool) -> st.SearchStrategy[Fill]:
    return _value(field, depth, likely).map(lambda value: lambda message: _set(message, field, value))


def _value(field: Any, depth: int, likely: bool) -> st.SearchStrategy[Any]:
    if likely and field.name in LIKELY and (_is_map(field) or field.cpp_type != _F.CPPTYPE_MESSAGE):
        value = LIKELY[field.name]
        return value.map(abs) if field.cpp_type in _UNSIGNED and not field.is_repeated else value
    if _is_map(field):
        entry = field.message_type.fields_by_name
        keys, values = (_single(entry[name], depth - 1, likely) for name in ("key", "value"))
        return st.dictionaries(keys, values, max_size=4)
    single = _single(field, depth - 1, likely)
    return st.lists(single, max_size=5 if depth > 1 else 1) if field.is_repeated else single


def _single(field: Any, depth: int, likely: bool) -> st.SearchStrategy[Any]:
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        if depth <= 0:
            return st.just(lambda _: None)
        return st.deferred(lambda: _of(field.message_type, depth, likely))
    if field.cpp_type == _F.CPPTYPE_STRING:
        return _bytes if field.type == _F.TYPE_BYTES else _texts
    return _SCALARS[field.cpp_type]


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _set(message: Any, field: Any, value: Any) -> None:
    own = getattr(message, field.name)
    if _is_map(field):
        of_messages = field.message_type.fields_by_name["value"].cpp_type == _F.CPPTYPE_MESSAGE
        for key, each in value.items():
            if of_messages:
                each(own[key])
            else:
                own[key] = each
    elif field.is_repeated:
        for each in value:
            if field.cpp_type == _F.CPPTYPE_MESSAGE:
                each(own.add())
            else:
                own.append(each)
    elif field.cpp_type == _F.CPPTYPE_MESSAGE:
        own.SetInParent()
        value(own)
    else:
        setattr(message, field.name, value)


def request_class(method: Any) -> type[Message]:
    """Return the class of a method's requests, from the method's descriptor."""
    return GetMessageClass(method.input_type)

"""The enums of `common.contracts.types` to and from those of the protos, whose names are the same but for a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from common.contracts.errors import ProtocolViolation
from common.contracts.types import FinishReason, KvGroupKind, MissReason, SequencePhase
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2

_EnumT = TypeVar("_EnumT", FinishReason, KvGroupKind, MissReason, SequencePhase)

_FINISH: Final = {each: types_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}") for each in FinishReason}
_MISS: Final = {each: types_pb2.MissReason.Value(f"MISS_REASON_{each.name}") for each in MissReason}
_PHASE: Final = {each: kvmanager_pb2.SequencePhase.Value(f"SEQUENCE_PHASE_{each.name}") for each in SequencePhase}
_GROUP: Final = {each: types_pb2.KvGroupKind.Value(f"KV_GROUP_KIND_{each.name}") for each in KvGroupKind}
_FINISH_BACK: Final[dict[int, FinishReason]] = {number: each for each, number in _FINISH.items()}
_MISS_BACK: Final[dict[int, MissReason]] = {number: each for each, number in _MISS.items()}
_PHASE_BACK: Final[dict[int, SequencePhase]] = {number: each for each, number in _PHASE.items()}
_GROUP_BACK: Final[dict[int, KvGroupKind]] = {number: each for each, number in _GROUP.items()}


def finish_to_proto(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    return _FINISH[reason]


def finish_from_proto(number: int, unknown: FinishReason | None = None) -> FinishReason:
    """Return why a sequence ended. An unmapped number gives `unknown`, or ProtocolViolation without one."""
    return _known(_FINISH_BACK, number, unknown, "no reason for an end")


def miss_to_proto(reason: MissReason) -> types_pb2.MissReason.ValueType:
    return _MISS[reason]


def miss_from_proto(number: int, unknown: MissReason | None = None) -> MissReason:
    """Return why no more was cached. An unmapped number gives `unknown`, or ProtocolViolation without one."""
    return _known(_MISS_BACK, number, unknown, "no reason for a miss")


def phase_to_proto(phase: SequencePhase) -> kvmanager_pb2.SequencePhase.ValueType:
    return _PHASE[phase]


def phase_from_proto(number: int) -> SequencePhase:
    """Raises ProtocolViolation for an unmapped number."""
    return _known(_PHASE_BACK, number, None, "no phase of a sequence")


def group_kind_to_proto(kind: KvGroupKind) -> types_pb2.KvGroupKind.ValueType:
    return _GROUP[kind]


def group_kind_from_proto(number: int) -> KvGroupKind:
    """Raises ProtocolViolation for an unmapped number."""
    return _known(_GROUP_BACK, number, None, "no kind of a group")


def _known(values: Mapping[int, _EnumT], number: int, unknown: _EnumT | None, what: str) -> _EnumT:
    found = values.get(number, unknown)
    if found is None:
        raise ProtocolViolation(f"{number} is {what} that is known here")
    return found

"""KV hints as vLLM and SGLang carry them with a request: what each action asks of the cache, and what becomes of it.

A hint is advice. So none refuses its request, and each is answered in the trailing metadata `x-kv-hints`, as JSON:

    {"message_id": "m1", "decision_id": "m-77", "actions": [{"action_id": "a1", "outcome": "accepted"}, ...]}

`kv.retain` becomes `cache_retention`, within the same bounds of its tenant. The others are an operator's here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from common.contracts.lease import DEFAULT_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY, RetainedTokens
from common.contracts.limits import MAX_RETENTION_RANGES
from quire.inference.v1 import inference_pb2 as own
from quire.vllm.v1 import inference_pb2 as pb

ANSWER_KEY: Final = "x-kv-hints"
PROTOCOL: Final = "0.1"
_RETAIN: Final = "kv.retain"
_RETAIN_MAJOR: Final = "1"
_MOST_ACTIONS: Final = 16
_MOST_DIRECTIVES: Final = 128
_MOST_PAYLOAD_BYTES: Final = 64 << 10
_LONGEST_S: Final = 30 * 86_400.0
_MOST_SHOWN: Final = 64
_MOST_TOKENS: Final = 2**31 - 1
_FIELDS: Final = frozenset({"start", "end", "priority", "duration", "covers_output"})
_ELSEWHERE: Final = {
    "kv.pin": "an operator pins prefixes, by `quire pin`",
    "kv.prefetch": "an operator prefetches, by `quire prefetch`",
    "kv.fetch": "the KV manager fetches what pays by itself",
    "kv.evict": "the KV manager evicts; retain with priority 0 what is to be kept no longer than usual",
    "kv.demote": "the KV manager moves what it evicts to host memory by itself",
}


class Outcome(StrEnum):
    """What became of an action: CLIPPED was followed in part."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one action; `priority` is the highest of what it retains."""

    action_id: str
    outcome: Outcome
    why: str = ""
    priority: int = DEFAULT_RETENTION_PRIORITY

    def fields(self) -> Mapping[str, str]:
        found = {"action_id": self.action_id, "outcome": self.outcome.value}
        return found | ({"reason": self.why} if self.why else {})


class _Wrong(Exception):
    """Says what is wrong with an action."""


@dataclass(frozen=True, slots=True)
class _Directive:
    """A range of tokens and how long it stays; no `end`: to the end of the output. `output` is the output alone."""

    start: int
    end: int | None
    priority: int
    duration: float | None
    output: bool = False

    @property
    def place(self) -> float:
        return float("inf") if self.output else self.start


def read_hints(envelope: pb.KVHintsEnvelope, retention: own.CacheRetention) -> Sequence[Answer]:
    """Let a request retain what its hints ask for, and return an answer for each action, in their order."""
    if envelope.protocol_version != PROTOCOL:
        why = f"protocol {envelope.protocol_version[:_MOST_SHOWN]!r} is not spoken here; expected {PROTOCOL!r}"
        return [_refused(each, why) for each in envelope.actions[:_MOST_ACTIONS]]
    answers, followed = list[Answer](), list[_Directive]()
    for place, action in enumerate(envelope.actions[: _MOST_ACTIONS + 1]):
        if place == _MOST_ACTIONS:
            answers.append(_refused(action, f"is beyond {_MOST_ACTIONS} actions, as are all behind it"))
            break
        try:
            asked = _directives_of(action)
            _check_order([*followed, *asked])
        except _Wrong as wrong:
            answers.append(_refused(action, str(wrong)))
            continue
        followed += asked
        answers.append(_follow(action, asked, retention))
    return answers


def _refused(action: pb.KVHintAction, why: str) -> Answer:
    return Answer(action.action_id[:_MOST_SHOWN], Outcome.REFUSED, why)


def _directives_of(action: pb.KVHintAction) -> list[_Directive]:
    """Raises _Wrong for an action that is not followed, or that says what none may."""
    kind, version = action.action_type, action.action_version
    if kind != _RETAIN:
        shown = f"{kind[:_MOST_SHOWN]!r} is not followed"
        raise _Wrong(f"{shown}: {_ELSEWHERE[kind]}" if kind in _ELSEWHERE else f"{shown}; expected {_RETAIN!r}")
    if version.partition(".")[0] != _RETAIN_MAJOR:
        raise _Wrong(f"version {version[:_MOST_SHOWN]!r} of it is not known here; expected {_RETAIN_MAJOR}.x")
    payload = _payload(action.payload)
    if unknown := sorted(payload.keys() - {"scope", "directives"}):
        raise _Wrong(f"payload has {unknown[0][:_MOST_SHOWN]!r}; expected scope and directives")
    directives = payload.get("directives")
    if not isinstance(directives, list) or len(directives) > _MOST_DIRECTIVES:
        raise _Wrong(f"directives must be a list of at most {_MOST_DIRECTIVES}")
    return [_directive(each, f"directives[{place}]") for place, each in enumerate(directives)]


def _payload(payload: Struct) -> Mapping[str, object]:
    if payload.ByteSize() > _MOST_PAYLOAD_BYTES:
        raise _Wrong(f"payload has {payload.ByteSize()} bytes; expected at most {_MOST_PAYLOAD_BYTES}")
    try:
        found: Mapping[str, object] = MessageToDict(payload)
    except ValueError:  # a number that is none, or no value at all
        raise _Wrong("payload has a value that JSON has not; expected finite numbers") from None
    return found


def _directive(given: object, path: str) -> _Directive:
    if not isinstance(given, dict) or (unknown := given.keys() - _FIELDS):
        what = "must be an object" if not isinstance(given, dict) else f"has {min(unknown)[:_MOST_SHOWN]!r}"
        raise _Wrong(f"{path} {what}; expected {', '.join(sorted(_FIELDS))}")
    priority = _whole(given.get("priority"), f"{path}.priority", 0, MAX_RETENTION_PRIORITY)
    duration = given.get("duration")
    if duration is not None and not (_is_number(duration) and 0 < duration <= _LONGEST_S):
        raise _Wrong(f"{path}.duration must be seconds, above 0 and at most {_LONGEST_S:.0f}")
    output = given.get("covers_output", False)
    if not isinstance(output, bool) or (output and (given.keys() & {"start", "end"})):
        raise _Wrong(f"{path}.covers_output must be a boolean, and stands without start and end")
    start = _whole(given.get("start", 0), f"{path}.start", 0, _MOST_TOKENS)
    end = given.get("end")
    if end is not None:
        end = _whole(end, f"{path}.end", start + 1, _MOST_TOKENS)
    return _Directive(start, end, priority, duration, output)


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _whole(value: object, path: str, least: int, most: int) -> int:
    if not _is_number(value) or value != int(value) or not least <= value <= most:  # type: ignore[call-overload, operator]
        raise _Wrong(f"{path} must be a whole number of {least} to {most}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _check_order(directives: Sequence[_Directive]) -> None:
    """What stands behind a block is of no use without it, so it may not stay longer by its priority."""
    ordered = sorted(directives, key=lambda each: each.place)
    for before, after in pairwise(ordered):
        if after.priority > before.priority:
            raise _Wrong(f"priorities must not rise along the tokens; {after.priority} stands behind {before.priority}")


def _follow(action: pb.KVHintAction, asked: Sequence[_Directive], retention: own.CacheRetention) -> Answer:
    """Add what an action asks for to the retention of the request."""
    left = list(_unfollowed(asked, retention))
    kept = [each.priority for each in asked if each.priority]
    highest = max(map(_own_priority, kept), default=DEFAULT_RETENTION_PRIORITY)
    outcome = Outcome.CLIPPED if left else Outcome.ACCEPTED
    return Answer(action.action_id[:_MOST_SHOWN], outcome, "; ".join(dict.fromkeys(left)), highest)


def _unfollowed(asked: Sequence[_Directive], retention: own.CacheRetention) -> Iterator[str]:
    """Add directives to a retention, and yield what of them is not followed."""
    for each in asked:
        if not each.priority:
            yield "priority 0 retains nothing, and what was retained before stays for its own time"
            continue
        priority = _own_priority(each.priority)
        if each.output or each.end is None:
            if retention.HasField("decode_priority"):
                yield "the output is retained by an earlier directive"
            else:
                retention.decode_priority = priority
                if each.duration is not None:
                    retention.decode_duration = each.duration
        if each.output:
            continue
        if len(retention.ranges) == MAX_RETENTION_RANGES:
            yield f"ranges beyond {MAX_RETENTION_RANGES} are left out"
            continue
        retention.ranges.append(
            own.RetentionRange(start=each.start, end=each.end, priority=priority, duration=each.duration)
        )


def _own_priority(priority: int) -> int:
    """Return a priority of 1 to 100 above that of blocks without retention: the field's lowest still protects."""
    room = MAX_RETENTION_PRIORITY - DEFAULT_RETENTION_PRIORITY
    return DEFAULT_RETENTION_PRIORITY + max(1, priority * room // MAX_RETENTION_PRIORITY)


def bounded(answers: Sequence[Answer], retained: Sequence[RetainedTokens]) -> Sequence[Answer]:
    """Return the answers once the tenant's bound is known: what it lowered was followed in part."""
    highest = max((each.priority for each in retained), default=DEFAULT_RETENTION_PRIORITY)
    return [_lowered(each, highest) for each in answers]


def _lowered(answer: Answer, highest: int) -> Answer:
    if answer.outcome is Outcome.REFUSED or answer.priority <= highest:
        return answer
    why = f"the tenant retains with priority {highest} at most" if highest > DEFAULT_RETENTION_PRIORITY else ""
    why = why or "nothing of it is retained: the tenant may not, or the prompt has no such tokens"
    return replace(answer, outcome=Outcome.CLIPPED, why="; ".join(filter(None, (answer.why, why))))


def packed(envelope: pb.KVHintsEnvelope, answers: Sequence[Answer], decision_id: str) -> str:
    """Return the value of the metadata `x-kv-hints`, in ASCII; `decision_id` is that of the request's admission."""
    found = {"message_id": envelope.message_id[:_MOST_SHOWN], "decision_id": decision_id}
    return json.dumps(found | {"actions": [each.fields() for each in answers]})

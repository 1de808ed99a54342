"""Reads messages of a foreign gRPC API: numbers in the ranges of Quire's own fields, and what is not known here.

A reader gathers mistakes, each with its path in the client's message. Those that validation finds get that path too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.contracts.errors import FieldViolation, InvalidRequest, QuireError
from common.contracts.limits import MAX_LOGIT_BIASES
from quire.inference.v1 import inference_pb2 as pb
from router.answers.reading import AskedConstraint
from router.api.shared.call_context import Context, metadata_of
from router.api.shared.constraints import FIELD, allowed_tokens, check_allowed, forbid_other_ends
from router.api.shared.metering import Meter
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext, ModelCard, RequestValidator

_MOST_INT32: Final = 2**31 - 1
# Wrong entries that are named one by one.
_MOST_NAMED: Final = 5
# Bytes of a message whose unknown fields are named, and of these fields, whose numbers are read one by one.
_MOST_NAMED_BYTES: Final = 1 << 20
_MOST_UNKNOWN_BYTES: Final = 16 << 10
# Where a gateway says which of a server's replicas is to serve a request.
RANK_HEADER: Final = "x-data-parallel-rank"
_ONE_RANK: Final = "expected 0 or nothing: the router chooses among its workers, which are no ranks to a client"


def unknown_fields(message: Message, spoken: str) -> Sequence[FieldViolation]:
    """Return which fields a message has that its declaration lacks: those of another version of the protocol.

    `spoken` says which version is declared. The message loses these fields.
    """
    expected, size = f"expected those of {spoken}; leave them out, or use a client of that version", message.ByteSize()
    encoded = message.SerializeToString() if size <= _MOST_NAMED_BYTES else b""
    message.DiscardUnknownFields()
    size -= message.ByteSize()
    if not size:
        return ()
    if encoded and size <= _MOST_UNKNOWN_BYTES:
        given = type(message).FromString(encoded)
        if named := [*_unknown_in(given, "request", "", expected)]:
            return named
    return [FieldViolation("request", f"has {size} bytes of fields that are not known here; {expected}")]


def _unknown_in(message: Message, name: str, path: str, expected: str) -> Iterator[FieldViolation]:
    """Yield the unknown fields of a message, and of single ones of its package within it."""
    found = UnknownFieldSet(message)
    numbers = sorted({found[place].field_number for place in range(len(found))})
    if numbers:
        named = ", ".join(map(str, numbers[:_MOST_NAMED]))
        yield FieldViolation(name, f"has fields that are not known here, with the numbers {named}; {expected}")
    for described, value in message.ListFields():
        within = described.message_type
        if within is not None and not described.is_repeated and within.file.package == message.DESCRIPTOR.file.package:
            yield from _unknown_in(value, path + described.name, f"{path}{described.name}.", expected)


@dataclass(slots=True)
class Reader:
    """What has been read so far: Quire's own request, and the mistakes."""

    generate: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)
    wrong: list[FieldViolation] = field(default_factory=list)

    def refuse(self, path: str, what: str) -> None:
        self.wrong.append(FieldViolation(path, what))

    def refuse_given(self, message: Message, path: str, reasons: Mapping[str, str]) -> None:
        """Refuse each field that is given, for a reason that says what to do."""
        for described, _ in message.ListFields():
            if (reason := reasons.get(described.name)) is not None:
                self.refuse(path + described.name, f"is given, and {reason}")

    def small(self, path: str, value: int) -> int | None:
        """Return an unsigned number as a field with a sign can hold it; None, and a mistake, if it cannot."""
        if value <= _MOST_INT32:
            return value
        self.refuse(path, f"is {value}; expected at most {_MOST_INT32}")
        return None

    def ids(self, path: str, ids: Sequence[int]) -> Sequence[int]:
        """Return token ids; those that no vocabulary has are mistakes, and 0 in the result."""
        if not ids or max(ids) <= _MOST_INT32:
            return ids
        huge = [place for place, each in enumerate(ids) if each > _MOST_INT32]
        for place in huge[:_MOST_NAMED]:
            self.refuse(f"{path}[{place}]", f"is {ids[place]}; expected a token id of the model's vocabulary")
        if len(huge) > _MOST_NAMED:
            self.refuse(path, f"has {len(huge) - _MOST_NAMED} more ids out of the vocabulary")
        return [0 if each > _MOST_INT32 else each for each in ids]

    def biases(self, path: str, biases: Mapping[int, float]) -> None:
        """Set the logit biases."""
        if len(biases) > MAX_LOGIT_BIASES:
            self.refuse(path, f"has {len(biases)} entries; expected at most {MAX_LOGIT_BIASES}")
            return
        for token_id, bias in biases.items():
            if token_id > _MOST_INT32:
                self.refuse(f"{path}[{token_id}]", "is for a token out of the vocabulary")
            else:
                self.generate.sampling.logit_bias[token_id] = bias

    def constrain(self, asked: AskedConstraint) -> dict[str, str]:
        """Set the constraint; return the name of its field for the client's."""
        kind = asked.constraint.kind.value
        setattr(self.generate, kind, asked.constraint.text)
        return {kind: asked.field}

    def allow(self, path: str, ids: Sequence[int], card: ModelCard) -> dict[str, str]:
        """Let the output have these tokens alone; return what `constrain` returns."""
        if len(ids) > card.vocab_size:
            self.refuse(path, f"has {len(ids)} ids; expected at most {card.vocab_size}, each of the vocabulary once")
            return {}
        try:
            check_allowed(ids, card.vocab_size)
        except InvalidRequest as error:
            self.wrong += [replace(each, field=path + each.field.removeprefix(FIELD)) for each in error.violations]
            return {}
        forbid_other_ends(self.generate.sampling, ids, card.eos_token_ids)
        return self.constrain(AskedConstraint(path, allowed_tokens(ids)))


@contextmanager
def charged_if_wrong(meter: Meter, call: CallContext) -> Iterator[None]:
    """Charge the caller for a request that is refused here: no validator sees it. Raises Overloaded in its place."""
    try:
        yield
    except QuireError:
        meter.wrong(call.caller.tenant)
        raise


def check_rank(context: Context) -> None:
    """Raise InvalidRequest where the metadata ask for another replica than the only one."""
    if (rank := metadata_of(context, RANK_HEADER).strip()) not in ("", "0"):
        raise InvalidRequest(FieldViolation(RANK_HEADER, f"is {rank[:_MOST_NAMED]!r}; {_ONE_RANK}"))


def wrong_rank(rank: int) -> str:
    return f"is {rank}; {_ONE_RANK}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. `violations` are all mistakes that its protocol can find.

    `named` turns a field of Quire's own request into that of the client's.
    """

    generate: pb.GenerateRequest
    violations: Sequence[FieldViolation]
    named: Callable[[str], str]

    async def validated(self, validator: RequestValidator, call: CallContext) -> ValidatedRequest:
        """Return the request that the frontend serves. Raises InvalidRequest with all mistakes at once."""
        try:
            request = await validator.validate(self.generate, call)
        except InvalidRequest as error:
            more = self._others(replace(each, field=self.named(each.field)) for each in error.violations)
            raise InvalidRequest(*self.violations, *more) from None
        if self.violations:
            raise InvalidRequest(*self.violations)
        return request

    def _others(self, found: Iterable[FieldViolation]) -> Iterator[FieldViolation]:
        named = {each.field for each in self.violations}
        return (each for each in found if each.field not in named)

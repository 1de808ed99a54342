"""A validator of a small model, and requests that it accepts or refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.types import Constraint
from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.checkpoint import Checkpoint
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext, ConstraintCheck
from router.requests.validate import Validator
from router.tenants.tenancy import Caller, Tenant

CONTEXT, VOCABULARY, SEED = 32, 100, 4711
ACME = Caller(Tenant("acme", max_priority=100, cache_domain=b"acme", shared_domains=(("open", b"shared"),)))
CALL = CallContext(arrived=5.0, deadline=9.0, caller=ACME)


class Words:
    """A codec whose tokens are the lengths of words; the word "refused" it cannot encode."""

    sees_tools = True
    added_tokens: Sequence[tuple[str, int, bool]] = (("<|end|>", 7, True), ("<|user|>", 8, True))
    hidden_tokens: Mapping[str, int] = MappingProxyType({"<|end|>": 7, "<|user|>": 8})

    async def encode(self, prompt: pb.Prompt, add_special_tokens: bool = True) -> list[int]:
        if prompt.text == "refused":
            raise InvalidRequest(FieldViolation("prompt.text", "is refused"))
        return list(prompt.token_ids.ids) or [len(word) for word in prompt.text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    async def text_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes | None:
        raise NotImplementedError

    def token_name(self, token_id: int) -> str:
        raise NotImplementedError


class OnlyDigits:
    """A check of constraints to which one alone is right."""

    async def check_constraint(self, constraint: Constraint, peer: str) -> None:
        if constraint.text != "[0-9]+":
            raise InvalidRequest(FieldViolation(constraint.kind.value, "is not of digits"))


class Anything:
    """A check of constraints to which all are right."""

    async def check_constraint(self, constraint: Constraint, peer: str) -> None:
        pass


def validator(
    defaults: Mapping[str, float] | None = None,
    max_new_tokens: int | None = None,
    has_tokenizer: bool = True,
    context: int = CONTEXT,
    constraints: ConstraintCheck | None = None,
    open_schemas: bool = False,
    codec: Words | None = None,
) -> Validator:
    checkpoint = Checkpoint(
        directory=Path("model"),
        max_model_len=CONTEXT,
        vocab_size=VOCABULARY,
        ends={1: ["config.json"]},
        sampling_defaults=defaults or {},
        max_new_tokens=max_new_tokens,
        tokenizer_fingerprint="none",
    )
    return Validator(
        codec or Words(),
        checkpoint,
        has_tokenizer,
        draw_seed=lambda: SEED,
        context=lambda: context,
        constraints=constraints,
        open_schemas=open_schemas,
    )


def request(text: str = "one two", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text), **fields)


async def accepted(message: pb.GenerateRequest, by: Validator | None = None) -> ValidatedRequest:
    return await (by or validator()).validate(message, CALL)


async def refused(message: pb.GenerateRequest, by: Validator | None = None) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        await (by or validator()).validate(message, CALL)
    return [f"{violation.field}: {violation.description}" for violation in caught.value.violations]


class Letters(Words):
    """A codec whose tokens are characters: a space before a word is a token of its own."""

    async def encode(self, prompt: pb.Prompt, add_special_tokens: bool = True) -> list[int]:
        assert not (prompt.text and add_special_tokens)
        return list(prompt.token_ids.ids) or [ord(letter) % VOCABULARY for letter in prompt.text]

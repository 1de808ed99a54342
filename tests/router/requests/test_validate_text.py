"""Constraints, bad words and predictions: what a request says of the text of its output."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, Unsupported
from common.contracts.types import Constraint, ConstraintKind
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1.types_pb2 import SamplingParams as Sampling
from tests.support.router.validation import (
    CALL,
    CONTEXT,
    VOCABULARY,
    Anything,
    Letters,
    OnlyDigits,
    accepted,
    refused,
    request,
    validator,
)


async def test_a_constraint_goes_with_the_sampling() -> None:
    by = validator(constraints=OnlyDigits())
    sampling = (await accepted(request(regex="[0-9]+"), by)).sampling
    assert sampling.constraint == Constraint(ConstraintKind.REGEX, "[0-9]+")


async def test_a_document_ends_where_it_is_complete_whatever_else_was_asked() -> None:
    by = validator(constraints=OnlyDigits())
    given = Sampling(ignore_eos=True, min_tokens=5, max_tokens=9)
    sampling = (await accepted(request(regex="[0-9]+", sampling=given), by)).sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (False, 0, 9)


async def test_objects_of_schemas_are_closed_unless_the_router_leaves_them_open() -> None:
    asked = request(json_schema='{"properties": {"a": {}}}')
    found = [
        (await accepted(asked, validator(constraints=Anything(), open_schemas=each))).sampling.constraint
        for each in (False, True)
    ]
    assert [each and each.text for each in found] == [
        '{"properties":{"a":{}},"additionalProperties":false}',
        '{"properties": {"a": {}}}',
    ]


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
async def test_a_wrong_constraint_is_reported_with_the_other_mistakes(kind: str) -> None:
    given = request("refused", **{kind: "x"})
    assert await refused(given, validator(constraints=OnlyDigits())) == [
        "prompt.text: is refused", f"{kind}: is not of digits"
    ]  # fmt: skip


async def test_without_a_tokenizer_constraints_are_not_offered() -> None:
    with pytest.raises(Unsupported, match=r"regex: this checkpoint has no tokenizer\.json to follow it with"):
        await accepted(request(regex="[0-9]+"), validator(has_tokenizer=False))


def _with_words(*words: str, **fields: Any) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[1, 2, 3])
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=ids), sampling=Sampling(bad_words=words), **fields)


async def test_bad_words_are_spelt_with_and_without_a_space() -> None:
    found = await accepted(_with_words("ab", " ab", " c"), validator(codec=Letters()))
    space, a, b, c = (ord(letter) % VOCABULARY for letter in " abc")
    assert found.sampling.bad_words == ((a, b), (space, a, b), (c,), (space, c))


@pytest.mark.parametrize(
    ("words", "field", "what"),
    [
        (["a"] * 129, "sampling.bad_words", "has 129 words; expected at most 128"),
        (["a", "  "], "sampling.bad_words[1]", "is empty; expected at least one character other than a space"),
        (["a" * 129], "sampling.bad_words[0]", "has 129 characters; expected at most 128"),
    ],
)
async def test_wrong_bad_words_are_named(words: list[str], field: str, what: str) -> None:
    assert await refused(_with_words(*words), validator(codec=Letters())) == [f"{field}: {what}"]


async def test_bad_words_stand_beside_no_constraint() -> None:
    by = validator(codec=Letters(), constraints=OnlyDigits())
    (what,) = await refused(_with_words("a", regex="[0-9]+"), by)
    assert what.startswith("sampling.bad_words: cannot be combined with regex")


async def test_nothing_is_sampled_only_where_log_probabilities_of_the_prompt_are_asked_for() -> None:
    message = _with_words()
    message.sampling.max_tokens = 0
    assert await refused(message) == ["sampling.max_tokens: is 0; expected 1 or more"]
    message.sampling.prompt_logprobs = 0
    found = await accepted(message)
    assert (found.sampling.max_tokens, found.sampling.prompt_logprobs, found.max_len) == (0, 0, 3)
    message.sampling.min_tokens = 1
    assert await refused(message) == ["sampling.min_tokens: is 1; expected at most max_tokens, which is 0"]


async def test_a_prediction_is_made_of_tokens_and_cut_to_the_context() -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(text="a bb"), prediction="ccc dddd")
    assert (await validator().validate(request, CALL)).prediction == (3, 4)
    request.prediction = "a " * 100
    assert (await validator().validate(request, CALL)).prediction == (1,) * CONTEXT


async def test_a_prediction_that_is_too_long_is_refused() -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(text="a"), prediction="a" * 65_537)
    with pytest.raises(InvalidRequest) as refused:
        await validator().validate(request, CALL)
    (violation,) = refused.value.violations
    assert (violation.field, violation.description) == (
        "prediction",
        "has 65537 characters; expected at most 65536",
    )

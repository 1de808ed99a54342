"""Schemas as people publish them, at random: what a router lets pass is followed to valid documents, without dead ends.

Each token is drawn at random from the mask, so that outputs come where no model would go.
"""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from cli.demo_model import CHECKPOINT
from common.contracts.json_schema import enforceable
from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from gpuworker.sampling.rows import SampledRow
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.sequence import Constrained
from router.answers.constraints.examiner import _verdict
from tests.support.gpuworker.random_schemas import Schema, StrangeSchemas

EOS, MOST_TOKENS, OUTPUTS = 0, 300, 2
# What a schema that is not strict may be refused for: it allows nothing.
CONTRADICTS = "allows no value"
TOKENIZER = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[EOS])


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(CHECKPOINT / "tokenizer.json", TOKENIZER.vocab_size, (EOS,))


def constraint_of(schema: Schema) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def drawn(grammars: GrammarCompiler, constraint: Constraint, seed: int) -> tuple[Constrained, bytes]:
    """Return a sequence that has ended, or has as many tokens as may be, and its text."""
    rng, output = np.random.default_rng(seed), list[int]()
    liked = rng.normal(0, 2, TOKENIZER.vocab_size)
    followed = Constrained.by(grammars, SampledRow(SamplingParams(constraint=constraint), 1, (EOS,)), ())
    while followed.ending is None and len(output) < MOST_TOKENS:
        bits = np.frombuffer(followed.matcher.compute_bitmask(), dtype=np.uint32).copy()
        followed.settle(bits)
        if followed.ending is None:
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size])
            heat = rng.choice([0.5, 1.0, 3.0])
            token = int(allowed[np.argmax(liked[allowed] + heat * rng.gumbel(size=len(allowed)))])
            followed.consume(token)
            output += [token] if token != EOS else []
    return followed, TOKENIZER.decode_bytes(output)


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 150), pytest.param(150, 450, marks=pytest.mark.rest), pytest.param(600, 1_400, marks=pytest.mark.exhaustive)],
)
def test_what_is_let_pass_ends_in_valid_documents(grammars: GrammarCompiler, first: int, count: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + count):
        schema = StrangeSchemas(seed).schema()
        wrong, _ = _verdict(TOKENIZER, constraint_of(schema))
        seen["refused"] += bool(wrong)
        assert "Lark" not in wrong
        assert "regex" not in wrong.lower().replace("'regex'", "")
        for number in range(0 if wrong else OUTPUTS):
            followed, text = drawn(grammars, constraint_of(schema), 10 * seed + number)
            if followed.ending is None:
                seen["cut"] += 1
                continue
            assert followed.ending.reason is FinishReason.STOP, (schema, text, followed.ending.message)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            seen["ended"] += 1
    assert seen["ended"] > count, seen
    assert seen["refused"] < count / 2, seen


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 100), pytest.param(100, 300, marks=pytest.mark.rest), pytest.param(400, 600, marks=pytest.mark.exhaustive)],
)
def test_a_schema_that_need_not_be_enforced_is_refused_only_if_it_contradicts_itself(first: int, count: int) -> None:
    refused = Counter[str]()
    for seed in range(first, first + count):
        wrong, _ = _verdict(TOKENIZER, constraint_of(enforceable(StrangeSchemas(seed).schema(), lenient=True)))
        refused[wrong] += bool(wrong)
        assert not wrong or wrong.startswith(CONTRADICTS), StrangeSchemas(seed).schema()
    assert refused.total() < count / 2

"""Numbers end: after so many digits no digit may follow where something else may, and texts keep all of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.demo_model import CHECKPOINT
from common.contracts.types import Constraint, ConstraintKind, SamplingParams
from gpuworker.sampling.rows import SampledRow
from gpuworker.structured.digits import MOST_DIGITS
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.sequence import COMPLETE, Constrained

VOCAB, EOS = 2027, 5
TOKENIZER: Path = CHECKPOINT / "tokenizer.json"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, (EOS,))


def next_after(compiler: GrammarCompiler, constraint: Constraint, text: str) -> tuple[set[str], Constrained]:
    """Return the ASCII characters that may follow a text, and the sequence."""
    row = SampledRow(SamplingParams(constraint=constraint), 0, (EOS,))
    grammar = compiler.compile(constraint)
    tokens = compiler._tokens().tokenize_str(text)
    followed = Constrained(grammar, row, tokens)
    bits = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    followed.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    followed.settle(bits)
    spell = compiler.spelling()
    allowed = {spell(token) for token in range(VOCAB) if int(bits[token >> 5]) >> (token & 31) & 1}
    return {chr(each[0]) for each in allowed if len(each) == 1 and each[0] < 128}, followed


def schema(**properties: object) -> Constraint:
    made = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(made))


def test_a_number_ends_after_so_many_digits(compiler: GrammarCompiler) -> None:
    begun = '{"a": 1'
    free, _ = next_after(compiler, schema(a={"type": "number"}), begun + "7" * (MOST_DIGITS - 2))
    ended, _ = next_after(compiler, schema(a={"type": "number"}), begun + "7" * (MOST_DIGITS - 1))
    assert "7" in free
    assert ended == free - set("0123456789")
    assert {"}", ".", "e"} <= ended


def test_a_text_keeps_its_digits(compiler: GrammarCompiler) -> None:
    for text in ({"type": "string"}, {"type": "string", "pattern": "^[0-9]+$"}):
        allowed, _ = next_after(compiler, schema(a=text), '{"a": "' + "7" * (2 * MOST_DIGITS))
        assert {"7", '"'} <= allowed


def test_digits_that_a_schema_asks_for_are_written(compiler: GrammarCompiler) -> None:
    fixed = schema(a={"type": "string", "pattern": f"^[0-9]{{{3 * MOST_DIGITS}}}$"})
    assert next_after(compiler, fixed, '{"a": "' + "7" * (2 * MOST_DIGITS))[0] == set("0123456789")


def test_a_number_alone_ends_the_output(compiler: GrammarCompiler) -> None:
    alone = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')
    _, followed = next_after(compiler, alone, "7" * MOST_DIGITS)
    assert followed.ending == COMPLETE


def test_other_constraints_have_digits_without_end(compiler: GrammarCompiler) -> None:
    digits = Constraint(ConstraintKind.REGEX, "[0-9]+")
    assert next_after(compiler, digits, "7" * (2 * MOST_DIGITS))[0] == set("0123456789")

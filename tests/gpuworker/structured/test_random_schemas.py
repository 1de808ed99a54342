"""200 random schemas, each followed at temperature 1: every document that the model finishes is valid.

The model of the demo was not trained on JSON, and its tokens cross the borders of its parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import torch
from tokenizers import Tokenizer

import cli.demo_model
from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from gpuworker.config import GpuWorkerSettings
from gpuworker.plane.assembly import assemble
from gpuworker.structured.grammars import GrammarCompiler
from tests.support.gpuworker.engine_harness import EngineDriver, Result
from tests.support.gpuworker.random_schemas import Schema, SchemaMaker

CHECKPOINT = Path(cli.demo_model.__file__).parent / "checkpoint"
COUNT, MOST_TOKENS = 200, 300


def follow(schemas: list[Schema]) -> tuple[list[Result], GrammarCompiler]:
    """Follow all schemas in one engine, 64 at a time."""
    settings = GpuWorkerSettings(
        model=str(CHECKPOINT), dtype="float32", kv_blocks=1500, max_model_len=512, max_num_seqs=64, threads=1
    )
    plane = assemble(settings)
    grammars = plane.grammars
    assert grammars is not None
    prompt = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode("Tell me about Lydia.").ids
    with EngineDriver(plane.runner, plane.agent_config()) as engine:
        for seed, schema in enumerate(schemas):
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
            sampling = SamplingParams(temperature=1.0, seed=seed, constraint=constraint)
            engine.submit(prompt, MOST_TOKENS, sampling, eos=plane.facts.eos)
        return engine.finish(), grammars


def test_every_finished_document_is_valid() -> None:
    threads = torch.get_num_threads()
    maker, tokenizer = SchemaMaker(seed=20), Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    schemas = [maker.schema() for _ in range(COUNT)]
    results, grammars = follow(schemas)
    torch.set_num_threads(threads)
    cut = 0
    for schema, result in zip(schemas, results, strict=True):
        if result.reason is FinishReason.LENGTH:
            matcher = grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).matcher()
            assert matcher.validate_tokens(result.tokens) == len(result.tokens) == MOST_TOKENS
            cut += 1
            continue
        assert result.reason is FinishReason.STOP, (schema, result.message)
        text = tokenizer.decode(result.tokens)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert cut <= COUNT // 10

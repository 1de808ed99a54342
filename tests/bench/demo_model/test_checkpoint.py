"""The checkpoint that ships: its size and shape, and that it answers what its model card says it answers."""

import json
import random

import pytest
import torch

from bench.demo_model import evaluate, probes
from bench.demo_model.evaluate import Judge
from cli.demo_model import CHECKPOINT, prompts

MEGABYTE = 10**6


@pytest.fixture(scope="module")
def judge() -> Judge:
    torch.set_num_threads(1)
    return Judge(CHECKPOINT, count=20)


def test_all_files_together_stay_within_eight_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8 * MEGABYTE


def test_it_is_a_bfloat16_qwen3_with_grouped_queries() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_attention_heads"] > config["num_key_value_heads"]


def test_every_token_has_an_embedding_and_none_is_spare(judge: Judge) -> None:
    assert judge.model.config.vocab_size == judge.encode.tokenizer.get_vocab_size()


def test_it_answers_the_demonstration_prompts(judge: Judge) -> None:
    for question in prompts.questions():
        chat = f"<|bos|><|system|> {prompts.system_text()}<|end|><|user|> {question.text}<|end|><|assistant|>"
        answer = judge.generate(judge.encode(chat), tokens=24)
        assert judge.text(answer).strip() == question.answer


@pytest.mark.parametrize("distance", [64, 256, 1024])
def test_it_recalls_held_out_facts(judge: Judge, distance: int) -> None:
    rng = random.Random(distance)
    drawn = [probes.draw(rng, judge.encode, distance, 1.0) for _ in range(40)]
    asked = [probe for probe in drawn if not probe.fact.relation.digits]
    assert sum(map(judge.recalls, asked)) >= 0.95 * len(asked)


def test_a_wrong_block_shows(judge: Judge) -> None:
    drawn = judge.draw(evaluate.KIND_DISTANCE, 1.0)
    right = [probe for probe in drawn if judge.recalls(probe)]
    spoilt = sum(judge.recalls_with_block(probe, evaluate.own_block) for probe in right)
    other = sum(judge.recalls_with_block(probe, evaluate.later_block) for probe in right)
    assert len(right) >= 10
    assert spoilt <= 0.2 * len(right)
    assert other >= 0.8 * len(right)

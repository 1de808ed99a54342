"""Suites on GGUF files: every service takes the file itself, and tokens are those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cli.suite.stack import StackOptions
from common.checkpoint.gguf.names import gguf_file, served_folder
from common.contracts.errors import InvalidConfig
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.models.hf.loader import make_module, read_config
from tests.support.gguf_files import reference, write_model
from tests.support.suite import PATIENCE, chat, greedy, running_suite

TOKENS = 24
_SUBJECTS = (
    "the sea", "a small dog", "winter in the mountains", "the history of bread", "learning to swim",
    "a letter from an old friend", "the planet Mars", "a broken clock", "how rain is made", "the first day of school",
)  # fmt: skip
_FORMS = (
    "Write one sentence about {}.",
    "What is interesting about {}?",
    "Once upon a time, there was a story about {}. It began",
    "List three words that belong to {}:",
    "Explain {} to a child of 5 years.",
)
PROMPTS = tuple(form.format(subject) for form in _FORMS for subject in _SUBJECTS)


def options(model: Path, *worker_flags: str) -> StackOptions:
    """Return a suite whose services all get the name of the model as it was given."""
    flags = ("--dtype", "float32", *worker_flags)
    return StackOptions(model=model, worker_flags=flags, manager_flags=("--model", str(model)))


def assert_greedy(model: Any, prompt: list[int], found: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found[:-1]]])).logits[0, len(prompt) - 1 :]
    assert found == logits.argmax(-1).tolist()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
async def test_router_manager_and_worker_serve_a_file(tmp_path: Path) -> None:
    file = write_model(tmp_path / "Tiny.Q4_1.gguf", kind="Q4_1", tied=True)
    model = reference(file, tied=True)
    async with running_suite(tmp_path, options(file, "--kv-blocks", "64")) as suite:
        prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((3, 41, 17))]
        outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, TOKENS)) for prompt in prompts))
        answer = await suite.generate(chat("Hello", max_tokens=8))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert_greedy(model, prompt, outcome.tokens)
    assert answer.finished is not None
    assert answer.admitted is not None


def smollm2() -> Path:
    """Return the folder of SmolLM2; skip where its package is not installed."""
    try:
        file = gguf_file("smollm2")
    except InvalidConfig as error:
        pytest.skip(str(error))
    assert file is not None
    return served_folder(file)


def widened_model(folder: Path) -> Any:
    """Return transformers' model on the weights of a GGUF file in float32."""
    checkpoint = Checkpoint(folder)
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint}
    return make_module(read_config(folder), weights, torch.float32, torch.device("cpu")).eval()


@pytest.mark.rest
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.exhaustive)])
async def test_prompts_to_smollm2_get_the_tokens_of_transformers_on_the_widened_weights(
    count: int, tmp_path: Path
) -> None:
    folder = smollm2()
    assert len(set(PROMPTS)) == 50
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [encoder.encode(text).ids for text in PROMPTS[:count]]
    async with running_suite(tmp_path, options(Path("smollm2"), "--kv-blocks", "512")) as suite:
        outcomes = await asyncio.gather(
            *(suite.generate(greedy(prompt, TOKENS), timeout=3 * PATIENCE) for prompt in prompts)
        )
        answer = await suite.generate(chat("What is the capital of France?"))
    assert "Paris" in answer.text
    model = widened_model(folder)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert len(outcome.tokens) == TOKENS
        assert_greedy(model, prompt, outcome.tokens)

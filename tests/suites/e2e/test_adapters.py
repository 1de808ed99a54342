"""Adapters in a suite: chosen by model name, listed with their base, apart in the cache, loaded while others stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cli.suite.stack import StackOptions
from tests.support.adapters import adapter, tokens_of
from tests.support.checkpoints import checkpoint
from tests.support.suite import Suite, running_suite

KIND = "llama"
PROMPT = [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45]
COUNT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which adapters may be loaded at run time."""
    return tmp_path_factory.mktemp("adapters")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Suite]:
    """One worker with room for two adapters, and two of its own."""
    flags = ("--kv-blocks", "256", "--dtype", "float32", "--max-loras", "2", "--lora-dir", str(folder))
    flags += tuple(word for each in (0, 1) for word in ("--lora", f"own-{each}={adapter(KIND, each)}"))
    options = StackOptions(model=checkpoint(KIND), workers=1, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


async def complete(suite: Suite, model: str | None, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        body |= {"return_token_ids": True} | more
        answer = await client.post(f"{suite.stack.http_url}/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def test_a_model_name_selects_the_base_or_an_adapter(adapted: Suite) -> None:
    answers = await asyncio.gather(*(complete(adapted, name) for name in (None, "own-0", "own-1")))
    for answer, variant in zip(answers, (None, 0, 1), strict=True):
        assert answer["choices"][0]["token_ids"] == tokens_of(KIND, variant, PROMPT, COUNT)
    assert [answer["model"] for answer in answers[1:]] == ["own-0", "own-1"]

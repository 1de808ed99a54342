"""The same folder embeds to the same vectors here and in sentence-transformers, which also writes it anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest

from cli.suite.stack import StackOptions
from tests.suites.clients.served import ROOT, missing
from tests.support.embeddings import embedding_checkpoint
from tests.support.suite import running_suite

PACKAGES = ROOT / ".embedders"
TEXTS = ["a small town", "x", "the river, the bridge and the mill " * 8]
CASES = [("llama", "mean"), ("qwen3", "last")]
LIMIT_S: Final = 600.0  # the library imports a thousand files

Theirs = list[tuple[Path, Any]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """The folders that sentence-transformers wrote, and its vectors; one process makes all."""
    if not (PACKAGES / "sentence_transformers").is_dir():
        missing(".embedders", "make clients")
    rewritten = [tmp_path_factory.mktemp("folder") / "model" for _ in CASES]
    folders = [(str(embedding_checkpoint(*case)), str(path)) for case, path in zip(CASES, rewritten, strict=True)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", str(Path(__file__).with_name("embed_calls.py"))],
        input=json.dumps({"packages": str(PACKAGES), "texts": TEXTS, "folders": folders}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(zip(rewritten, map(np.array, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case) for case in CASES])
async def test_vectors_are_those_of_sentence_transformers(theirs: Theirs, tmp_path: Path, case: int) -> None:
    folder, expected = theirs[case]
    flags = ("--kv-blocks", "256", "--dtype", "float32", "--max-num-batched-tokens", "48")
    async with running_suite(tmp_path, StackOptions(model=folder, worker_flags=flags)) as suite:
        url = f"{suite.stack.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = await client.embeddings.create(model="", input=TEXTS)
    found = np.array([each.embedding for each in answer.data])
    assert np.abs(found - expected).max() < 1e-5

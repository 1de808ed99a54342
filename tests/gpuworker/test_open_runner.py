"""From options to a runner: what the rest of the worker learns about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import Unsupported
from common.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.types import KvGeometry, PoolIdentity
from gpuworker.memory import MemoryOptions
from gpuworker.models.loader import ModelSource
from gpuworker.open_runner import OpenedRunner, RunnerOptions, open_runner
from tests.checkpoints import EOS, VOCAB_SIZE, checkpoint, hf_greedy
from tests.gpuworker.runner_driver import Driver


def opened(directory: Path, load_format: str = "auto") -> OpenedRunner:
    source = ModelSource(str(directory), load_format=load_format, seed=3)
    return open_runner(RunnerOptions(source, MemoryOptions(kv_blocks=128, max_num_seqs=4), device="cpu", threads=1))


def test_it_says_what_may_share_blocks_with_it() -> None:
    directory = checkpoint("llama")
    found = opened(directory)
    found.runner.close()
    geometry = KvGeometry(3, 2, 16, 16, "float32")
    assert found.identity == PoolIdentity(model_fingerprint(directory), tokenizer_fingerprint(directory), 16, geometry)
    assert (found.eos_token_ids, found.vocab_size, found.ledger.max_model_len) == ((EOS,), VOCAB_SIZE, 1024)


def test_random_weights_are_another_model() -> None:
    found = opened(checkpoint("llama"), load_format="dummy")
    found.runner.close()
    assert found.identity.model_fingerprint == model_fingerprint(checkpoint("llama"), dummy_seed=3)


def test_its_runner_generates() -> None:
    found = opened(checkpoint("qwen3"))
    driver = Driver(found.runner)
    stream = driver.add([20, 30, 40], 8)
    driver.run()
    found.runner.close()
    assert stream.output == hf_greedy(checkpoint("qwen3"), [20, 30, 40], 8)


def test_a_model_that_cannot_be_hosted_is_refused_at_the_door() -> None:
    with pytest.raises(Unsupported, match="falcon cannot be served"):
        opened(checkpoint("falcon"))

"""--speculative is refused at the start where drafts could change tokens, or where nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from common.contracts.errors import InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.plane.assembly import ModelPlane, assemble
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS, NgramDrafter
from tests.support.checkpoints import checkpoint


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assembled(**options: Any) -> ModelPlane:
    settings = {"kv_blocks": 64, "threads": 1, "device": "cpu", "speculative": "ngram"} | options
    plane = assemble(GpuWorkerSettings(model=str(checkpoint("llama")), **settings))
    plane.runner.close()
    return plane


def test_a_worker_drafts_where_it_is_asked_to() -> None:
    assert assembled().agent_config().new_drafter is NgramDrafter
    assert assembled(speculative="none").agent_config().new_drafter is None


def test_the_rows_of_drafts_are_in_the_plan_of_memory() -> None:
    with_drafts, without = assembled().memory, assembled(speculative="none").memory
    vocab = assembled().facts.vocab_size
    assert with_drafts.activations - without.activations >= MAX_STEP_DRAFTS * vocab * 16


def test_transformers_code_drafts_in_float32_alone() -> None:
    assert assembled(model_impl="transformers", dtype="float32").agent_config().new_drafter is NgramDrafter
    with pytest.raises(InvalidConfig, match=r"--speculative.*bfloat16.*use --dtype float32.*leave it out"):
        assembled(model_impl="transformers", dtype="bfloat16")


def test_workers_that_embed_do_not_draft() -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative.*embed prompts.*leave it out"):
        assembled(pooling="last")


def test_simulated_workers_do_not_draft() -> None:
    settings = GpuWorkerSettings(model="x", speculative="ngram", simulate="base=5ms")
    (found,) = settings.problems()
    assert (found.field, "leave out one of them" in found.description) == ("--speculative", True)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match="expected none, ngram or draft"):
        GpuWorkerSettings(model="x", speculative="medusa")

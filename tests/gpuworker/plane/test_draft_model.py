"""A draft model is refused at the start where it cannot guess for the model, with the reason and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.contracts.errors import InvalidConfig
from common.settings.config import load
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import GIB
from gpuworker.plane.assembly import ModelPlane, assemble
from gpuworker.plane.draft_checks import tokens_of, why_not_same
from gpuworker.plane.memory import MemoryOptions, plan_draft
from gpuworker.plane.preflight import Machine, problems
from gpuworker.runner.draft_model import RunnerDraftModel
from gpuworker.scheduling.drafting import NO_PRICES
from tests.support.checkpoints import checkpoint, nearly

MACHINE = Machine(torch="2.13.0+cpu", cuda_devices=0, available_bytes=16 * GIB, address_space=None)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def copied(source: Path, folder: Path, vocabulary: dict[str, str] | None = None, **config: Any) -> Path:
    """Return a copy of a checkpoint in which tokens have other names, and the configuration other values."""
    folder.mkdir()
    for path in source.iterdir():
        text = path.read_bytes()
        if path.name == "config.json":
            text = json.dumps(json.loads(text) | config).encode()
        if path.name == "tokenizer.json":
            whole = json.loads(text)
            vocab = whole["model"]["vocab"]
            whole["model"]["vocab"] = {(vocabulary or {}).get(token, token): number for token, number in vocab.items()}
            text = json.dumps(whole).encode()
        (folder / path.name).write_bytes(text)
    return folder


def found(*flags: str, machine: Machine = MACHINE, workers: int = 1) -> dict[str, str]:
    settings = load(GpuWorkerSettings, ("--model", str(checkpoint("llama")), *flags), {})
    return {each.field: each.description for each in problems(settings, checkpoint("llama"), machine, workers)}


def assembled(**options: Any) -> ModelPlane:
    settings = {"kv_blocks": 64, "threads": 1, "device": "cpu", "draft_model": str(nearly("llama"))} | options
    return assemble(GpuWorkerSettings(model=str(checkpoint("llama")), **settings))


# ---------------------------------------------------------------- before torch


def test_a_model_of_the_same_tokenizer_is_taken() -> None:
    assert found("--draft-model", str(nearly("llama"))) == {}


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    other = copied(checkpoint("llama"), tmp_path / "other", {"a": "b", "b": "a"})
    said = found("--draft-model", str(other))["--draft-model"]
    assert "has another vocabulary: token 70 is 'b' there and 'a' in the model, and 2 of 262 tokens differ" in said
    assert said.endswith("expected a smaller model of the same family, whose tokenizer is that of the model")


def test_tokens_behind_the_end_of_the_shorter_vocabulary_do_not_matter() -> None:
    ours = {0: "a", 1: "b", 2: "c"}
    assert why_not_same(ours, {0: "a", 1: "b"}) is None
    assert why_not_same({0: "a"}, ours) is None
    assert why_not_same(ours, {0: "a", 2: "c"}) == (
        "has another vocabulary: token 1 is None there and 'b' in the model, and 1 of 3 tokens differ"
    )
    assert why_not_same(ours, {}) == "has no tokens in its tokenizer.json, or the model has none"


def test_vocabularies_of_unigrams_and_added_tokens_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    whole = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": [{"id": 2, "content": "<s>"}]}
    path.write_text(json.dumps(whole))
    assert tokens_of(path) == {0: "<unk>", 1: "a", 2: "<s>"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "holds a list; expected a JSON object"),
        ('{"model": {}}', "has no tokens in its tokenizer.json, or the model has none"),
        ('{"model": {"vocab": 3}}', "model.vocab is 3; expected an object of ids by token"),
        ('{"model": {"vocab": [[]]}}', "model.vocab[0] is []; expected a pair of text and score"),
    ],
)
def test_a_broken_tokenizer_is_named(text: str, why: str, tmp_path: Path) -> None:
    broken = copied(checkpoint("llama"), tmp_path / "broken")
    (broken / "tokenizer.json").write_text(text)
    assert why in found("--draft-model", str(broken))["--draft-model"]


def test_without_tokenizers_the_sizes_of_the_vocabularies_decide(tmp_path: Path) -> None:
    other = copied(checkpoint("llama"), tmp_path / "other", vocab_size=300)
    (other / "tokenizer.json").unlink()
    said = found("--draft-model", str(other))["--draft-model"]
    assert said.startswith(f"{other} has 300 tokens, and the model has 264; expected a smaller model")


def test_what_is_no_decoder_is_refused(tmp_path: Path) -> None:
    bert = copied(checkpoint("llama"), tmp_path / "bert", model_type="bert")
    assert "bert is an encoder" in found("--draft-model", str(bert))["--draft-model"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    empty = copied(checkpoint("llama"), tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert list(found("--draft-model", str(empty))) == ["--draft-model"]
    assert found("--draft-model", str(empty), "--load-format", "dummy") == {}


def test_a_path_that_is_not_there_is_refused_as_the_draft_models(tmp_path: Path) -> None:
    said = found("--draft-model", str(tmp_path / "none.gguf"))
    assert list(said) == ["--draft-model"]
    assert "no such file" in said["--draft-model"]


def test_weights_that_do_not_fit_beside_the_others_are_refused() -> None:
    small = Machine(torch="2.13.0+cpu", cuda_devices=0, available_bytes=2**20, address_space=None)
    said = found("--draft-model", str(nearly("llama")), "--kv-blocks", "4", machine=small, workers=8)["--draft-model"]
    assert "of weights for each of 8 workers, and 1.0 MiB of memory are free here; take a smaller one" in said


def test_drafts_need_a_model_where_one_is_to_guess() -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative.*no model is named that guesses; expected --draft-model"):
        found("--speculative", "draft")


def test_ngrams_need_none() -> None:
    with pytest.raises(InvalidConfig, match=r"--draft-model.*--speculative ngram guesses without one; leave out one"):
        found("--speculative", "ngram", "--draft-model", "x")


def test_simulated_workers_guess_nothing() -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative: is draft, and --simulate has nothing to verify"):
        found("--simulate", "base=5ms", "--draft-model", "x")


def test_another_vocabulary_is_found_without_torch(tmp_path: Path) -> None:
    other = copied(checkpoint("llama"), tmp_path / "other", {"a": "b", "b": "a"})
    words = ["--model", str(checkpoint("llama")), "--draft-model", str(other), "--device", "cpu"]
    program = (
        "import sys; sys.modules['torch'] = None; from gpuworker.main import assemble; "
        "from gpuworker.config import GpuWorkerSettings; from common.settings.config import load; "
        f"assemble(load(GpuWorkerSettings, {words!r}, {{}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "InvalidConfig" in done.stderr
    assert "has another vocabulary" in done.stderr


# ---------------------------------------------------------------- as it is built


def test_a_draft_model_guesses_in_the_place_of_the_default() -> None:
    plane = assembled()
    assert isinstance(plane.draft, RunnerDraftModel)
    config = plane.agent_config()
    assert config.draft_model is plane.draft
    assert config.new_drafter == plane.draft.new_drafter
    (line,) = [line for line in plane.start_lines() if line.startswith("draft model: ")]
    assert "of K/V for 1024 tokens; a guess takes " in line
    prices = plane.draft.priced(NO_PRICES)
    assert prices.guess > 0
    assert prices.catch_up > 0
    plane.runner.close()


def test_the_kv_of_one_sequence_must_fit() -> None:
    """The free memory is that of the machine: a pool that takes nearly all of it leaves nothing for the draft model."""
    plane = assembled()
    model, geometry = plane.model, plane.identity.kv_geometry
    full = replace(plane.memory, free=plane.memory.kv + plane.memory.activations + plane.memory.token_table + 4096)
    options = MemoryOptions(max_num_batched_tokens=64)
    with pytest.raises(InvalidConfig, match=r"--draft-model.*of one sequence of 1024 tokens.*4.0 KiB are left.*lower"):
        plan_draft(full, model, geometry, 2048, options)
    plan = plan_draft(plane.memory, model, geometry, 512, options)
    assert (plan.num_blocks, plan.max_model_len, plan.weights) == (64, 512, plane.memory.weights)
    plane.runner.close()


def test_a_kind_that_the_self_test_refuses_is_refused_by_name(tmp_path: Path) -> None:
    falcon = copied(checkpoint("falcon"), tmp_path / "falcon")
    with pytest.raises(InvalidConfig, match=r"--draft-model"):
        assembled(draft_model=str(falcon))


def test_models_that_do_not_draft_take_no_draft_model() -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative: is draft, and .*use --dtype float32"):
        assembled(model_impl="transformers", dtype="bfloat16")

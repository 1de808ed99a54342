"""Layers that keep a state: a packed step computes what each sequence alone does, however it is cut into steps."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import AttentionMetadata
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.hf.mixer_calls import MixerCall
from gpuworker.models.hf.mixers import MixerStates, correct_mixers
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.self_test import CallRecorder, self_test
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy, reference_model
from tests.support.gpuworker.runner_harness import CPU, Driver, runner_on, transformers_model

KINDS = ("qwen3_next", "lfm2", "minimax", "falcon_h1", "jamba", "zaya", "zamba2", "mamba", "falcon_mamba", "mamba2")
BLOCK, LENGTH, PLACES = 4, 40, 5
BACKEND = functools.partial(make_backend, "auto")


@functools.cache
def model_of(kind: str) -> TransformersModel:
    """Return a model whose self-test has shown its states."""
    model = transformers_model(checkpoint(kind))
    self_test(model, BACKEND)
    return model


@functools.cache
def expected(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [LENGTH] and the logits [LENGTH, vocab] that transformers computes for them alone."""
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    return tokens, model_of(kind).reference_logits(tokens[None])[0]


class Steps:
    """Sequences of LENGTH tokens, each on blocks and at a place of its own."""

    def __init__(self, kind: str, places: int = PLACES) -> None:
        self.kind, self.model = kind, model_of(kind)
        assert self.model.states is not None
        self.states = self.model.states
        self.states.reserve(places)
        self.attention = BACKEND(KvCache(self_test_geometry(kind), places * LENGTH // BLOCK, BLOCK, CPU))
        self.tables = np.arange(places * LENGTH // BLOCK, dtype=np.int32).reshape(places, -1)
        self.done: dict[int, int] = {}

    def run(self, rows: list[tuple[int, int, int]]) -> None:
        """Compute rows (place, seed of the sequence, tokens), and compare their logits with those of each alone."""
        rows = sorted(rows, key=lambda row: row[2] > 1)
        known = [expected(self.kind, seed) for _, seed, _ in rows]  # runs the model without a step
        start = np.array([self.done.get(place, 0) for place, _, _ in rows], dtype=np.int32)
        length = np.array([count for *_, count in rows], dtype=np.int32)
        packed = pack_rows(start, length, self.tables[[place for place, *_ in rows]], BLOCK)
        *tables, row, position = to_device([*attention_arrays(packed), packed.row_of_token, packed.positions], CPU)
        metadata = attention_metadata(packed, tables)
        self.attention.begin(metadata)
        self.states.begin(metadata, np.array([place for place, *_ in rows], dtype=np.int32))
        tokens = torch.stack([known[int(r)][0][int(p)] for r, p in zip(row, position, strict=True)])
        wanted = torch.stack([known[int(r)][1][int(p)] for r, p in zip(row, position, strict=True)])
        found = self.model.forward(tokens, position.long(), torch.arange(len(tokens)), self.attention)
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
        for place, _, count in rows:
            self.done[place] = self.done.get(place, 0) + count

    def leave(self, place: int) -> None:
        """Let another sequence have a place: it begins at position 0."""
        self.done.pop(place)


@functools.cache
def self_test_geometry(kind: str) -> Any:
    return self_test(transformers_model(checkpoint(kind)), BACKEND)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_however_sequences_are_cut_into_steps_their_logits_are_the_same(kind: str) -> None:
    """Five places; sequences come and go, in chunks of 1 to 17 tokens and single tokens, side by side."""
    rng, steps, seeds = random.Random(3), Steps(kind), {place: place for place in range(PLACES)}
    for _ in range(24):
        rows = []
        for place in rng.sample(range(PLACES), rng.randint(1, PLACES)):
            left = LENGTH - steps.done.get(place, 0)
            if not left or rng.random() < 0.1:
                if place in steps.done:
                    steps.leave(place)
                seeds[place], left = rng.randrange(6), LENGTH
            rows.append((place, seeds[place], min(left, rng.choice([1, 1, 2, 5, 17]))))
        steps.run(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_begins_without_the_state_that_its_place_had(kind: str) -> None:
    steps = Steps(kind)
    steps.run([(0, 1, 9)])
    steps.leave(0)
    steps.run([(0, 2, 1)])
    steps.run([(0, 2, 1), (1, 3, 1)])
    steps.run([(0, 2, 3), (1, 3, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(kind: str) -> None:
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((1, 3, 41, 70))]
    runner = runner_on(transformers_model(checkpoint(kind)))
    driver = Driver(runner)
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in zip(prompts, (99, 1, 7, 13), strict=True)]
    try:
        driver.run()
    finally:
        runner.close()
    assert [stream.output for stream in streams] == [hf_greedy(checkpoint(kind), prompt, 16) for prompt in prompts]


def test_only_where_chunks_do_not_go_on_with_a_state_tokens_go_one_by_one() -> None:
    by_token = {kind: states.token_by_token for kind in KINDS if (states := model_of(kind).states) is not None}
    assert by_token == {
        "qwen3_next": False,
        "lfm2": False,
        "minimax": False,
        "falcon_h1": False,
        "jamba": True,
        "zaya": False,
        "zamba2": False,
        "mamba": True,
        "falcon_mamba": True,
        "mamba2": False,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_that_do_not_go_on_are_found_where_they_look_like_rounding(dtype: str, tmp_path: Path) -> None:
    """With weights as small as these, what a state adds is less than what the test at start allows in 16 bits."""
    model: Any = copy.deepcopy(reference_model(checkpoint("jamba")))
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(0.1)
    model.save_pretrained(tmp_path)
    states = load_model(ModelSource(str(tmp_path), dtype=dtype), CPU).states
    assert states is not None
    assert states.token_by_token


def test_a_mixer_whose_single_tokens_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decodes read twice what its state is."""
    get = MixerCall.get_conv_state

    def doubled(self: MixerCall, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        found = get(self, layer_idx, state_idx)
        return None if found is None else 2 * found

    monkeypatch.setattr(MixerCall, "get_conv_state", doubled)
    with pytest.raises(Unsupported, match="Lfm2ShortConv computes something else token by token"):
        transformers_model(checkpoint("lfm2"))


def test_a_state_has_the_bytes_of_its_tensors() -> None:
    """lfm2: two convolutions of 64 channels and 3 columns. qwen3_next: three of 2 * 32 + 32 channels and 4 columns, and
    in each 4 heads of 16 x 8."""
    sizes = {kind: states.bytes_a_sequence for kind in ("lfm2", "qwen3_next") if (states := model_of(kind).states)}
    assert sizes == {"lfm2": 2 * 64 * 3 * 4, "qwen3_next": 3 * (96 * 4 + 4 * 16 * 8) * 4}


def test_the_cache_has_the_layers_that_attend_alone() -> None:
    geometries = {kind: self_test_geometry(kind).num_layers for kind in KINDS}
    some = {"qwen3_next": 1, "lfm2": 1, "minimax": 1, "falcon_h1": 3, "jamba": 1, "zaya": 3, "zamba2": 2}
    assert geometries == some | dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), 0)


def test_a_model_of_mixed_kinds_of_layers_may_have_none_that_attends() -> None:
    config: Any = copy.deepcopy(model_of("lfm2").module.config)
    config.layer_types = ["conv"] * 3
    module = type(model_of("lfm2").module)(config).eval()
    assert self_test(TransformersModel(module), BACKEND) == KvGeometry(0, 0, 0, 0, "float32")


def test_layers_that_are_neither_mixers_nor_attend_through_the_cache_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MixerStates, "layers", frozenset({0, 1}))
    with pytest.raises(Unsupported, match="0 of its 3 layers gave their attention to the cache"):
        self_test(transformers_model(checkpoint("mamba2")), BACKEND)


def test_states_that_are_kept_wrong_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test sees a step whose rows are not announced at their places."""
    begin = MixerStates.begin

    def shifted(self: MixerStates, step: AttentionMetadata, places: Any) -> None:
        begin(self, step, places if (step.context_len == np.diff(step.query_start)).all() else (places + 1) % 3)

    monkeypatch.setattr(MixerStates, "begin", shifted)
    with pytest.raises(Unsupported, match="its logits differ"):
        self_test(transformers_model(checkpoint("lfm2")), BACKEND)


def test_time_steps_are_bounded_as_the_configuration_says() -> None:
    class Config:
        time_step_limit = (0.0, float("inf"))

    class Mixer(torch.nn.Module):
        layer_idx, config, time_step_limit = 0, Config(), (0.001, float("inf"))

        def forward(self, hidden: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
            return cache_params.update_conv_state(hidden, 0)  # type: ignore[no-any-return]

    mixer = Mixer()
    said = correct_mixers(torch.nn.Sequential(mixer))
    assert said == ["time steps are bounded by (0.0, inf), as its configuration says, and not by (0.001, inf)"]
    assert mixer.time_step_limit == (0.0, float("inf"))
    assert correct_mixers(torch.nn.Sequential(mixer)) == []


def test_time_steps_without_bounds_in_the_configuration_have_none() -> None:
    """zamba2's `time_step_min` is that of the numbers with which a training begins."""
    model = model_of("zamba2")
    assert model.corrections == ["time steps are bounded by (0.0, inf), as in its decodes, and not by (1e-06, inf)"]
    limits = [each.time_step_limit for each in model.module.modules() if hasattr(each, "time_step_limit")]
    assert limits == [(0.0, float("inf"))] * 3


def test_bounds_that_prefills_alone_have_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that many time steps are below: decodes and prefills compute different states."""
    model = transformers_model(checkpoint("zamba2"))
    for module in model.module.modules():
        if hasattr(module, "time_step_limit"):
            monkeypatch.setattr(module, "time_step_limit", (1.0, float("inf")))
    with pytest.raises(Unsupported, match="through the paged cache, its logits differ"):
        self_test(model, BACKEND)


def test_attention_whose_weights_layers_share_has_the_number_of_the_layer_that_calls() -> None:
    recorder, first = CallRecorder(), torch.zeros(1, dtype=torch.int64)
    model_of("zamba2").forward(first, first, first, recorder)
    assert [layer.layer for layer in recorder.layers] == [0, 2]

"""Sequences that go on from the checkpoint of another one: their tokens are those of transformers."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.contracts.errors import Unsupported
from common.contracts.types import BlockId, KvGeometry, KvGroup, KvGroupKind, SequenceId
from gpuworker.attention.backends import backends_on, make_backend
from gpuworker.memory.layout import attending_groups, state_group
from gpuworker.memory.state_store import StateStore
from gpuworker.models.checkpoint_test import with_checkpoints
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.mixers import MixerStates
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepNotBuilt, StepPlan, StepResult
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import CPU, GREEDY, SLOTS, runner_on

FULL, WINDOW, STATE = KvGroupKind.FULL, KvGroupKind.WINDOW, KvGroupKind.STATE
S, F, L = "sliding_attention", "full_attention", "linear_attention"
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "num_hidden_layers": 3}
# What a family's published checkpoints say in small, and the layers of its groups.
CASES: dict[str, tuple[dict[str, Any], dict[KvGroupKind, tuple[int, ...]]]] = {
    "lfm2": ({"num_hidden_layers": 3, "layer_types": ["conv", F, "conv"]}, {FULL: (1,), STATE: (0, 2)}),
    "lfm3": (
        {"num_hidden_layers": 4, "layer_types": ["conv", S, F, S]},
        {FULL: (2,), WINDOW: (1, 3), STATE: (0,)},
    ),
    "qwen3_next": ({"num_hidden_layers": 4, "layer_types": [L, L, L, F]}, {FULL: (3,), STATE: (0, 1, 2)}),
    "kimi_linear": ({"num_hidden_layers": 3, "layer_types": [L, F, L]}, {FULL: (1,), STATE: (0, 2)}),
    "granitemoehybrid": (_MAMBA | {"layer_types": [L, F, L]}, {FULL: (1,), STATE: (0, 2)}),
    "falcon_h1": (_MAMBA | {"mamba_d_ssm": 128, "mamba_d_state": 16}, {FULL: (0, 1, 2), STATE: (0, 1, 2)}),
    # Chunks after the first go token by token.
    "jamba": (
        {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        {FULL: (1,), STATE: (0, 2)},
    ),
}


@functools.cache
def module_of(family: str) -> PreTrainedModel:
    module = random_module(tiny_config(CONFIG_MAPPING[family](), **CASES[family][0]), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(family: str) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(family)))


def geometry_of(model: TransformersModel, block_size: int = 16) -> KvGeometry:
    geometry = self_test(model, functools.partial(make_backend, "auto"), block_size=block_size)
    return with_checkpoints(model, functools.partial(make_backend, "auto"), geometry, block_size)


@dataclass
class Line:
    """A sequence: its prompt, the pages of its blocks in each group that keeps K and V, what it sampled."""

    sequence: SequenceId
    prompt: Sequence[int]
    tables: tuple[tuple[BlockId, ...], ...]
    output: list[int] = field(default_factory=list)


class Steps:
    """Runs planned rows, all of them in flight until `take`."""

    def __init__(self, runner: ModelRunner, groups: Sequence[KvGroup], block_size: int) -> None:
        self.runner, self.groups, self.block_size = runner, attending_groups(groups), block_size
        checkpoint = state_group(groups)
        assert checkpoint is not None
        self._pages_of_states = checkpoint.pages
        self._free = [BlockId(page) for page in range(SLOTS // block_size)]
        random.Random(0).shuffle(self._free)
        self._lines: dict[SequenceId, Line] = {}
        self._flying: list[Future[StepResult]] = []

    def add(self, prompt: Sequence[int], count: int, shared: tuple[Line, int] | None = None) -> Line:
        """Start a sequence with room for `count` further tokens, on so many first blocks of another one."""
        blocks, tables = -(-(len(prompt) + count) // self.block_size), []
        for place, group in enumerate(self.groups):
            of_other = shared[0].tables[place][: shared[1] * group.pages] if shared else ()
            tables.append(of_other + self.pages(blocks * group.pages - len(of_other)))
        line = Line(SequenceId(len(self._lines) + 1), prompt, tuple(tables))
        self._lines[line.sequence] = line
        self.runner.add_sequence(line.sequence, prompt, GREEDY, len(prompt))
        return line

    def pages(self, count: int) -> tuple[BlockId, ...]:
        return tuple(self._free.pop() for _ in range(count))

    def checkpoint(self, line: Line) -> Checkpoint:
        return Checkpoint(line.sequence, self.pages(self._pages_of_states))

    def checkpoints_everywhere(self, line: Line) -> list[Checkpoint]:
        """Return checkpoints on all free pages, which stay free."""
        pages, each = tuple(self._free), self._pages_of_states
        return [Checkpoint(line.sequence, pages[-each:])] + [
            Checkpoint(line.sequence, pages[at : at + each]) for at in range(0, len(pages) - each + 1, each)
        ]

    def step(
        self,
        *rows: tuple[Line, int, int],
        load: Sequence[Checkpoint] = (),
        save: Sequence[Checkpoint] = (),
    ) -> None:
        """Compute positions from one to another of some sequences."""
        planned = [
            ScheduledRow(line.sequence, start, end - start, (), end >= len(line.prompt), tables=line.tables)
            for line, start, end in rows
        ]
        plan = StepPlan(1, tuple(planned), loads=tuple(load), saves=tuple(save))
        self._flying.append(self.runner.submit_step(plan))

    def take(self) -> None:
        for future in self._flying:
            for sequence, tokens in future.result(timeout=60).sampled.items():
                self._lines[sequence].output.extend(tokens)
        self._flying.clear()


@pytest.mark.parametrize("family", CASES)
def test_the_groups_of_a_model_that_keeps_states(family: str) -> None:
    groups = geometry_of(model_of(family)).groups
    assert {group.kind: group.layers for group in groups} == CASES[family][1]
    assert groups[-1].kind is STATE


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", CASES)
def test_sequences_go_on_from_checkpoints_with_the_tokens_of_transformers(family: str, block_size: int) -> None:
    """One is saved behind a chunk of a prompt, the other behind a decode, whose sequence has left when it is loaded."""
    model, module = model_of(family), module_of(family)
    runner = runner_on(model, block_size, max_model_len=96, grouped=True)
    steps = Steps(runner, geometry_of(model_of(family), block_size).groups, block_size)
    early, late = 2 * block_size, 3 * block_size
    first = steps.add(random_prompt(early + 3), block_size + 2)
    second = steps.add([*first.prompt[:early], *random_prompt(7)], 10, (first, 2))
    kept, kept_late = steps.checkpoint(first), steps.checkpoint(first)
    try:
        steps.step((first, 0, early - 3))
        steps.step((first, early - 3, early), save=[kept])
        steps.step(
            (first, early, early + 3), (second, early, early + 7), load=[kept._replace(sequence=second.sequence)]
        )
        for done in range(8):
            rows = [(second, early + 7 + done, early + 8 + done)]
            if (at := early + 3 + done) < late:
                rows.insert(0, (first, at, at + 1))
            steps.step(*rows, save=[kept_late] if at + 1 == late else ())
        for at in range(early + 11, late):
            steps.step((first, at, at + 1), save=[kept_late] if at + 1 == late else ())
        steps.take()
        runner.remove(first.sequence)
        known = [*first.prompt, *first.output][:late]
        third = steps.add([*known, *random_prompt(5)], 6, (first, 3))
        steps.step((third, late, late + 5), load=[kept_late._replace(sequence=third.sequence)])
        fourth = steps.add([*first.prompt[:early], *random_prompt(6)], 6, (first, 2))
        steps.step(
            (third, late + 5, late + 6), (fourth, early, early + 1), load=[kept._replace(sequence=fourth.sequence)]
        )
        steps.step((third, late + 6, late + 7), (fourth, early + 1, early + 6))
        steps.take()
    finally:
        runner.close()
    for line in (first, second, third, fourth):
        assert line.output
        assert line.output == greedy_tokens(module, line.prompt, len(line.output), line.output), line.sequence


def test_a_sequence_that_loads_nothing_goes_on_with_what_its_place_had() -> None:
    """So the test above would see it."""
    model, module = model_of("lfm2"), module_of("lfm2")
    runner = runner_on(model, 4, max_model_len=96, grouped=True)
    steps = Steps(runner, geometry_of(model_of("lfm2"), 4).groups, 4)
    first = steps.add(random_prompt(11), 2)
    second = steps.add([*first.prompt[:8], *random_prompt(2)], 4, (first, 2))
    try:
        steps.step((first, 0, 8))
        for start in range(8, 13):
            steps.step((second, start, start + 1) if start > 8 else (second, 8, 10))
        steps.take()
    finally:
        runner.close()
    assert second.output != greedy_tokens(module, second.prompt, len(second.output))


def test_a_checkpoint_of_an_unknown_sequence_fails_its_step_alone() -> None:
    runner = runner_on(model_of("lfm2"), 4, max_model_len=96, grouped=True)
    steps = Steps(runner, geometry_of(model_of("lfm2"), 4).groups, 4)
    line = steps.add(random_prompt(8), 2)
    try:
        with pytest.raises(StepNotBuilt):
            steps.step((line, 0, 8), save=[Checkpoint(SequenceId(99), steps.pages(1))])
        steps.step((line, 0, 8))
        steps.take()
    finally:
        runner.close()
    assert line.output == greedy_tokens(module_of("lfm2"), line.prompt, 1)


@pytest.fixture(params=backends_on("cpu"))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and best() is None:
        pytest.skip("the native library was not built")
    monkeypatch.setattr(
        "tests.support.gpuworker.runner_harness.make_backend", lambda _, cache: make_backend(request.param, cache)
    )
    return str(request.param)


def tokens_in_bfloat16(family: str, had_states: bool) -> list[list[int]]:
    """Return what sequences sample on K and V in bfloat16, on pages that checkpoints in float32 may have filled."""
    model = TransformersModel(copy.deepcopy(module_of(family)), "bfloat16")
    groups = geometry_of(model).groups
    runner = runner_on(model, 16, max_model_len=96, grouped=True)
    steps = Steps(runner, groups, 16)
    first = steps.add(random_prompt(33), 2)
    steps.step((first, 0, 33), save=steps.checkpoints_everywhere(first) if had_states else ())
    lines = [steps.add(random_prompt(length), 12) for length in (1, 21, 70)]
    try:
        steps.step(*((line, 0, len(line.prompt)) for line in lines))
        for done in range(10):
            ends = ((line, len(line.prompt) + done) for line in lines)
            steps.step(*((line, end, end + 1) for line, end in ends))
        steps.take()
    finally:
        runner.close()
    return [line.output for line in lines]


@pytest.mark.parametrize("family", ["lfm3", "kimi_linear", "qwen3_next"])
@pytest.mark.usefixtures("backend")
def test_pages_that_held_states_are_numbers_again(family: str) -> None:
    assert tokens_in_bfloat16(family, had_states=True) == tokens_in_bfloat16(family, had_states=False)


@pytest.mark.usefixtures("backend")
def test_pages_that_were_not_cleared_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of float32 are infinite, or no numbers, as bfloat16; what a mask leaves out is multiplied by 0."""
    monkeypatch.setattr(StateStore, "clear", lambda *_: None)
    assert tokens_in_bfloat16("qwen3_next", had_states=True) != tokens_in_bfloat16("qwen3_next", had_states=False)


# ---------------------------------------------------------------- the test at start


def test_a_model_without_states_has_no_checkpoints() -> None:
    model = TransformersModel(random_module(tiny_config(CONFIG_MAPPING["qwen2"]()), torch.float32, 0, CPU))
    assert geometry_of(model).groups == ()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_narrower_caches_hold_states_too(kv_dtype: str) -> None:
    model = TransformersModel(copy.deepcopy(module_of("lfm2")), kv_dtype)
    assert [group.kind for group in geometry_of(model).groups] == [FULL, STATE]


def test_a_store_that_mistakes_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StateStore.load

    def shifted(self: StateStore, pages: Sequence[int], state: torch.Tensor) -> None:
        load(self, [*pages[1:], pages[0]], state)

    monkeypatch.setattr(StateStore, "load", shifted)
    with pytest.raises(Unsupported, match="run from a checkpoint of its states, its logits differ"):
        geometry_of(model_of("qwen3_next"))


def test_states_that_are_not_the_bytes_of_their_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = MixerStates.reserve

    def apart(self: MixerStates, places: int) -> None:
        reserve(self, places)
        self.kept = self.kept.clone()

    monkeypatch.setattr(MixerStates, "reserve", apart)
    with pytest.raises(Unsupported, match="run from a checkpoint of its states, its logits differ"):
        geometry_of(model_of("lfm2"))

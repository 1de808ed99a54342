"""Models whose layers keep states: whichever drafts are right, tokens are those of steps without drafts.

Sequences draft, go on without drafts, miss steps, leave checkpoints, are taken out and come back, in random orders.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.contracts.errors import EngineFailure, Unsupported
from common.contracts.types import BlockId, KvGroup, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.memory.layout import attending_groups, state_group
from gpuworker.models.checkpoint_test import with_checkpoints
from gpuworker.models.draft_test import refuse_wrong_states
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.mixers import MixerStates
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepPlan
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS
from tests.support.gpuworker.full_forward import random_prompt
from tests.support.gpuworker.runner_harness import CPU, GREEDY, SLOTS, Driver, runner_on

S, F, L = "sliding_attention", "full_attention", "linear_attention"
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "num_hidden_layers": 3, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": [L, L, L, F]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", F, "conv"]},
    "lfm3": {"num_hidden_layers": 4, "layer_types": ["conv", S, F, S]},
    "nemotron_h": {"layers_block_type": [L, "mlp", F, L], "mamba_num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128, "mamba_d_state": 16},
    # Chunks after the first go token by token.
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    # No layer attends, and there are no checkpoints.
    "mamba2": {"num_heads": 8, "head_dim": 16, "num_hidden_layers": 2, "chunk_size": 8},
}
BLOCK, LENGTH, OUTPUT, PROMPTS = 4, 64, 40, (1, 5, 9, 14)
BACKEND = functools.partial(make_backend, "auto")


@functools.cache
def module_of(family: str) -> PreTrainedModel:
    module = random_module(tiny_config(CONFIG_MAPPING[family](), **FAMILIES[family]), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(family: str) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(family)))


@functools.cache
def groups_of(family: str) -> tuple[KvGroup, ...]:
    model = model_of(family)
    return with_checkpoints(model, BACKEND, self_test(model, BACKEND, block_size=BLOCK), BLOCK).groups


@functools.cache
def texts(family: str) -> tuple[tuple[int, ...], ...]:
    """Return prompts of `PROMPTS` tokens, each with what follows it without drafts."""
    runner = runner_on(model_of(family), BLOCK, max_model_len=LENGTH, grouped=True)
    driver = Driver(runner, BLOCK, groups=groups_of(family))
    streams = [driver.add(random_prompt(length), OUTPUT) for length in PROMPTS]
    try:
        driver.run()
    finally:
        runner.close()
    return tuple([(*stream.prompt, *stream.output) for stream in streams])


class Line:
    """A sequence: all its tokens, how many of them it has, how many positions are computed, its blocks or pages."""

    def __init__(self, sequence: int, tokens: Sequence[int], prompt: int, tables: tuple[tuple[BlockId, ...], ...]):
        self.sequence, self.tokens, self.prompt, self.tables = SequenceId(sequence), tuple(tokens), prompt, tables
        self.has, self.computed, self.runs = prompt, 0, False
        self.kept: list[tuple[int, Checkpoint]] = []
        """Checkpoints, and the positions behind which they were saved."""
        self.load: Checkpoint | None = None


class Walk:
    """Runs random steps over some lines, and compares what they sample."""

    def __init__(self, runner: ModelRunner, states: MixerStates, family: str, seed: int) -> None:
        self.runner, self.states, self.rng = runner, states, random.Random(seed)
        groups = groups_of(family)
        self.pages_of_states = group.pages if (group := state_group(groups)) else 0
        self.free = [BlockId(page) for page in range(SLOTS // BLOCK)]
        self.rng.shuffle(self.free)
        pages = [group.pages for group in attending_groups(groups)]
        self.grouped, self.step_number, self.wrong, self.right = bool(pages), 0, 0, 0
        self.lines = [
            Line(number, tokens, length, self._tables(pages or [1]))
            for number, (tokens, length) in enumerate(zip(texts(family), PROMPTS, strict=True), start=1)
        ]

    def _tables(self, pages: Sequence[int]) -> tuple[tuple[BlockId, ...], ...]:
        return tuple([self._take(each * LENGTH // BLOCK) for each in pages])

    def _take(self, count: int) -> tuple[BlockId, ...]:
        return tuple([self.free.pop() for _ in range(count)])

    def run(self) -> None:
        while any(line.has < len(line.tokens) for line in self.lines):
            for line in self.lines:
                if line.runs and self.rng.random() < 0.05:
                    self.runner.remove(line.sequence)
                    line.runs = False
            chosen = [line for line in self.lines if line.has < len(line.tokens) and self.rng.random() < 0.7]
            if chosen:
                self.step(chosen)

    def begin(self, line: Line) -> None:
        """Let a line come in, from its start or from a checkpoint."""
        self.runner.add_sequence(line.sequence, line.tokens[: line.has], GREEDY, line.prompt)
        line.runs, line.computed, line.load = True, 0, None
        usable = [each for each in line.kept if each[0] < line.has]
        if usable and self.rng.random() < 0.7:
            line.computed, line.load = self.rng.choice(usable)

    def step(self, chosen: list[Line]) -> None:
        rows, loads, saves, wanted = [], list[Checkpoint](), list[Checkpoint](), dict[SequenceId, tuple[int, ...]]()
        drafts, drafting = 0, self.rng.random() < 0.7
        for line in chosen:
            if not line.runs:
                self.begin(line)
            row, right = self.row(line, drafting)
            drafts += len(row.drafts)
            rows.append(row)
            if line.load is not None:
                loads.append(line.load)
                line.load = None
            end = row.start + row.length
            if self.pages_of_states and end % BLOCK == 0 and len(line.kept) < 2 and self.rng.random() < 0.5:
                saves.append(self.checkpoint(line))
                line.kept.append((end, saves[-1]))
            line.computed = end
            if row.samples:
                wanted[line.sequence] = line.tokens[line.has : line.has + right + 1]
                line.has, line.computed = line.has + right + 1, end + right
        rows.sort(key=lambda row: row.length > 1)
        self.step_number += 1
        plan = StepPlan(self.step_number, tuple(rows), drafts=drafts, loads=tuple(loads), saves=tuple(saves))
        assert self.runner.submit_step(plan).result(timeout=60).sampled == wanted

    def checkpoint(self, line: Line) -> Checkpoint:
        return Checkpoint(line.sequence, self._take(self.pages_of_states))

    def compute(
        self,
        line: Line,
        length: int,
        drafts: tuple[int, ...] = (),
        loads: tuple[Checkpoint, ...] = (),
        saves: tuple[Checkpoint, ...] = (),
    ) -> tuple[int, ...]:
        """Run a step of one row, and return what it samples."""
        samples = line.computed + length == line.has
        row = ScheduledRow(line.sequence, line.computed, length, (), samples, drafts, line.tables)
        plan = StepPlan(1, (row,), drafts=len(drafts), loads=loads, saves=saves)
        sampled = self.runner.submit_step(plan).result(timeout=60).sampled.get(line.sequence, ())
        line.computed, line.has = line.computed + length + max(0, len(sampled) - 1), line.has + len(sampled)
        return sampled

    def row(self, line: Line, drafting: bool) -> tuple[ScheduledRow, int]:
        """Return the next row of a line, and how many of its drafts are right."""
        left = line.has - line.computed
        length = min(left, self.rng.choice((1, 3, 8)))
        right, drafts = 0, tuple[int, ...]()
        if drafting and left == 1 and line.has > line.prompt:
            most = min(MAX_STEP_DRAFTS // len(self.lines), len(line.tokens) - line.has - 1)
            right, wrong = self.rng.randint(0, max(0, most)), self.rng.randint(0, 2)
            right = min(right, most - wrong)
            if right >= 0:
                guessed = line.tokens[line.has : line.has + right]
                drafts = (*guessed, *((token + 1) % 160 for token in line.tokens[line.has + right :][:wrong]))
                self.right, self.wrong = self.right + right, self.wrong + wrong
            right = max(0, right)
        blocks, tables = ((), line.tables) if self.grouped else (line.tables[0], ())
        return ScheduledRow(line.sequence, line.computed, length, blocks, length == left, drafts, tables), right


@contextmanager
def walking(family: str, seed: int) -> Iterator[Walk]:
    model = model_of(family)
    assert model.states is not None
    runner = runner_on(model, BLOCK, max_model_len=LENGTH, grouped=True)
    try:
        yield Walk(runner, model.states, family, seed)
    finally:
        runner.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_tokens_do_not_depend_on_which_drafts_are_right(family: str, seed: int) -> None:
    with walking(family, seed) as walk:
        walk.run()
        assert walk.right > 20
        assert walk.wrong > 5


def _never(_: MixerStates, place: int, drafts: int) -> None:
    """The states stay behind the sequence."""


def _all(states: MixerStates, place: int, _: int) -> None:
    """They follow refused drafts too."""
    states.kept[place].copy_(states.kept[states._drafted[place][-1]])


def _of_another(states: MixerStates, place: int, drafts: int) -> None:
    """They follow the drafts of another sequence."""
    other = next((each for each in states._drafted if each != place), place)
    states.kept[place].copy_(states.kept[states._drafted[other][0]])


WRONG: list[Callable[..., None]] = [_never, _all, _of_another]


@pytest.mark.parametrize("accept", WRONG)
def test_the_walks_see_states_that_follow_wrong_drafts(
    accept: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixerStates, "accept", accept)
    with walking("lfm2", 0) as walk, pytest.raises(AssertionError):
        walk.run()


def test_sequences_that_miss_a_step_go_on_behind_their_drafts() -> None:
    """The next step, of another sequence, drafts itself."""
    with walking("lfm2", 0) as walk:
        first, second = walk.lines[1:3]
        for line in (first, second):
            walk.begin(line)
            assert walk.compute(line, line.prompt) == line.tokens[line.prompt :][:1]
        assert walk.compute(first, 1, first.tokens[6:9]) == first.tokens[6:10]
        assert walk.compute(second, 1, second.tokens[10:14]) == second.tokens[10:15]
        assert walk.compute(first, 1) == first.tokens[10:11]
        assert walk.compute(second, 1) == second.tokens[15:16]


def test_a_checkpoint_in_a_step_with_drafts_has_the_states_behind_the_last_known_token() -> None:
    with walking("lfm2", 0) as walk:
        line, kept = walk.lines[1], walk.checkpoint(walk.lines[1])
        walk.begin(line)
        assert walk.compute(line, 5) == line.tokens[5:6]
        assert walk.compute(line, 1) == line.tokens[6:7]
        assert walk.compute(line, 1) == line.tokens[7:8]
        assert walk.compute(line, 1, line.tokens[8:10], saves=(kept,)) == line.tokens[8:11]
        walk.runner.remove(line.sequence)
        walk.begin(line)
        line.computed = 8
        assert walk.compute(line, 3, loads=(kept,)) == line.tokens[11:12]


def test_a_place_that_is_used_again_begins_without_the_drafts_of_the_sequence_before() -> None:
    """One leaves behind its drafts; the next one has its place, and goes on from a checkpoint of its own."""
    with walking("lfm2", 0) as walk:
        first, second = walk.lines[1:3]
        kept = walk.checkpoint(second)
        walk.begin(second)
        assert walk.compute(second, 8, saves=(kept,)) == ()
        walk.runner.remove(second.sequence)
        walk.begin(first)
        assert walk.compute(first, 5) == first.tokens[5:6]
        assert walk.compute(first, 1, first.tokens[6:8]) == first.tokens[6:9]
        walk.runner.remove(first.sequence)
        walk.begin(second)
        second.computed = 8
        assert walk.compute(second, 1, loads=(kept,)) == second.tokens[9:10]


def test_more_drafts_than_states_were_reserved_fail_the_step() -> None:
    with walking("lfm2", 0) as walk:
        line = walk.lines[1]
        walk.begin(line)
        walk.compute(line, 5)
        states = walk.states
        states.reserve(8, 2)
        with pytest.raises(EngineFailure, match="a step has 3 drafts of sequences with states; 2 were reserved"):
            walk.compute(line, 1, line.tokens[6:9])


# ---------------------------------------------------------------- the test at start


@pytest.mark.parametrize("family", FAMILIES)
def test_models_pass_the_test_of_their_states_behind_drafts(family: str) -> None:
    model = model_of(family)
    for block_size in (0, BLOCK):
        refuse_wrong_states(model, BACKEND, self_test(model, BACKEND, block_size=block_size))


@pytest.mark.parametrize("accept", WRONG)
def test_states_that_follow_wrong_drafts_are_refused_at_start(
    accept: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("lfm2")
    geometry = self_test(model, BACKEND)
    monkeypatch.setattr(MixerStates, "accept", accept)
    with pytest.raises(Unsupported, match=r"cannot be served with drafts: .* its logits differ"):
        refuse_wrong_states(model, BACKEND, geometry)


def test_drafts_that_change_the_states_of_their_sequence_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row leaves its states at the place, as if there were no drafts."""
    model = model_of("qwen3_next")
    geometry = self_test(model, BACKEND)
    rows = MixerStates._rows
    monkeypatch.setattr(
        MixerStates,
        "_rows",
        lambda states, places: [
            row._replace(before=place, place=place) for row, place in zip(rows(states, places), places, strict=True)
        ],
    )
    with pytest.raises(Unsupported, match=r"cannot be served with drafts: .* its logits differ"):
        refuse_wrong_states(model, BACKEND, geometry)

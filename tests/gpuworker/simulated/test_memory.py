"""What a simulated worker with states reads: a wrong state or block changes each token from there on, and nothing else.

Blocks have 2 slots. Layers that attend have a page a block, a checkpoint has two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.contracts.types import BlockId, KvGroup, KvGroupKind, SamplingParams, SequenceId
from gpuworker.config import GpuWorkerSettings
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepPlan
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.simulated.memory import SimulatedMemory
from gpuworker.simulated.plane import SimulatedPlane, assemble
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens
from tests.gpuworker.simulated.test_simulated import CONFIG

FULL, STATES = KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.STATE, 0, 2, (0,))
WINDOW = KvGroup(KvGroupKind.WINDOW, 2, 1, (2,))
PROMPT = [7, 8, 9, 7, 8]
OTHER = [7, 8, 9, 9, 8]
TABLE = (0, 1, 2, 3)


class Worker:
    """A runner whose steps are given one by one; the tokens of every sequence follow from the same seed."""

    def __init__(self, *groups: KvGroup) -> None:
        self.tokens = SimulatedTokens(range(100, 200))
        groups = groups or (FULL, STATES)
        self.runner = SimulatedRunner(StepCosts(), self.tokens, memory=SimulatedMemory(groups, 2))

    def add(self, sequence: int, tokens: list[int]) -> None:
        self.runner.add_sequence(SequenceId(sequence), tokens, SamplingParams(seed=1), len(tokens))

    def step(
        self,
        sequence: int,
        start: int,
        length: int,
        *tables: tuple[int, ...],
        loads: tuple[int, ...] = (),
        saves: tuple[int, ...] = (),
        samples: bool = True,
    ) -> int:
        """Run one row with a table of pages for each group; return by how much its token is not the right one."""
        of, pages = SequenceId(sequence), tuple(tuple(map(BlockId, table)) for table in tables)
        row = ScheduledRow(of, start, length, (), samples, (), pages)
        loaded, saved = ((Checkpoint(of, tuple(map(BlockId, each))),) if each else () for each in (loads, saves))
        sampled = self.runner.submit_step(StepPlan(1, (row,), loads=loaded, saves=saved)).result(60.0).sampled
        assert bool(sampled) == samples
        right = self.tokens.expected(1, start + length, 1)
        return sum(token - wanted for (token,) in sampled.values() for wanted in right)


@pytest.fixture
def worker() -> Any:
    made = Worker()
    yield made
    made.runner.close()


def begun(worker: Worker, saves: tuple[int, ...] = (8, 9)) -> None:
    """Let sequence 1 compute its prompt, leave a checkpoint behind 4 tokens, and end."""
    worker.add(1, PROMPT)
    assert worker.step(1, 0, 4, TABLE, saves=saves, samples=False) == 0
    assert worker.step(1, 4, 1, TABLE) == 0
    assert worker.step(1, 5, 1, TABLE) == 0
    worker.runner.remove(SequenceId(1))


def test_a_sequence_goes_on_from_the_checkpoint_of_another(worker: Worker) -> None:
    begun(worker)
    worker.add(2, PROMPT)
    assert worker.step(2, 4, 1, (0, 1, 5), loads=(8, 9)) == 0
    assert worker.step(2, 5, 1, (0, 1, 5)) == 0


@pytest.mark.parametrize("loads", [(), (9, 8), (8,), (8, 6)], ids=["none", "turned", "a part", "another page"])
def test_without_the_right_state_every_token_differs(worker: Worker, loads: tuple[int, ...]) -> None:
    begun(worker)
    worker.add(2, PROMPT)
    assert worker.step(2, 4, 1, (0, 1, 5), loads=loads) == 1
    assert worker.step(2, 5, 1, (0, 1, 5)) == 1
    worker.runner.remove(SequenceId(2))
    worker.add(2, PROMPT)
    assert worker.step(2, 0, 5, (5, 6, 7)) == 0, "it computes all, and needs no state"


def test_the_state_of_other_tokens_is_not_its_own(worker: Worker) -> None:
    begun(worker)
    worker.add(2, OTHER)
    worker.step(2, 0, 4, (4, 5), saves=(8, 9), samples=False)
    worker.add(3, PROMPT)
    assert worker.step(3, 4, 1, (0, 1, 6), loads=(8, 9)) == 1


def test_a_checkpoint_behind_other_tokens_of_its_own_is_not_that_of_the_boundary(worker: Worker) -> None:
    worker.add(1, PROMPT)
    worker.step(1, 0, 5, TABLE, saves=(8, 9))
    worker.add(2, PROMPT)
    assert worker.step(2, 4, 1, (0, 1, 5), loads=(8, 9)) == 1


@pytest.mark.parametrize("written", [(9,), (1,)], ids=["the checkpoint", "K and V"])
def test_pages_that_another_sequence_has_written_are_not_what_they_were(
    worker: Worker, written: tuple[int, ...]
) -> None:
    begun(worker)
    worker.add(2, OTHER)
    assert worker.step(2, 0, 2, written, samples=False) == 0
    worker.add(3, PROMPT)
    assert worker.step(3, 4, 1, (0, 1, 5), loads=(8, 9)) == 1


def test_a_checkpoint_in_pages_of_another_overwrites_its_keys(worker: Worker) -> None:
    worker.add(1, PROMPT)
    assert worker.step(1, 0, 5, TABLE) == 0
    worker.add(2, OTHER)
    worker.step(2, 0, 2, (6,), saves=(1, 7), samples=False)
    assert worker.step(1, 5, 1, TABLE) == 1


def test_a_block_that_left_the_window_may_hold_anything() -> None:
    """A window of 2 tokens: at position 4 block 1 is read, at position 6 block 2."""
    worker = Worker(FULL, WINDOW, STATES)
    worker.add(1, PROMPT)
    worker.add(2, OTHER)
    tables = TABLE, (10, 11, 12, 13)
    assert worker.step(1, 0, 4, *tables) == 0
    worker.step(2, 0, 2, (5,), (10,), samples=False)
    assert worker.step(1, 4, 1, *tables) == 0
    assert worker.step(1, 5, 1, *tables) == 0
    worker.step(2, 2, 2, (5, 6), (10, 12), samples=False)
    assert worker.step(1, 6, 1, *tables) == 1, "it reads block 2"
    worker.runner.close()


HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
"""One layer with states of 4 * 8 * 8 numbers and 64 channels of 4 columns; the other attends."""


def plane(folder: Path, **options: Any) -> SimulatedPlane:
    (folder / "config.json").write_text(json.dumps(CONFIG | HYBRID))
    made = assemble(GpuWorkerSettings(model=str(folder), simulate="base=1ms", **options))
    made.runner.close()
    return made


def test_layers_that_keep_states_have_checkpoints(tmp_path: Path) -> None:
    """2048 bytes of states; a page has K and V of one layer, 2 heads of 8 numbers, 16 slots: 2048 bytes in float32."""
    made = plane(tmp_path, kv_blocks=20)
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.STATE, 0, 1, (0,)))
    assert made.agent_config().groups == made.identity.kv_geometry.groups == groups
    assert (made.agent_config().prefix_caching, made.keeps_states) == (True, False)
    words = "hits from 16 tokens on, where a prompt of 17 or more leaves a checkpoint behind it"
    assert made.start_lines()[1:] == [f"prefix cache: {words}"]
    narrow = plane(tmp_path, kv_blocks=20, dtype="bfloat16").identity.kv_geometry
    assert narrow.groups[-1].pages == 2, "1024 + 512 bytes, and pages of 1024"


def test_without_checkpoints_it_shares_no_prefix(tmp_path: Path) -> None:
    made = plane(tmp_path, kv_blocks=20, prefix_caching=False)
    assert (made.identity.kv_geometry.groups, made.keeps_states) == ((), True)
    assert not made.attach("w0", "").prefix_caching


def test_drafts_are_refused_where_layers_keep_states(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative: is ngram, and layers keep states.*leave it out"):
        plane(tmp_path, speculative="ngram")

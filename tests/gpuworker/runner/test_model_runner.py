"""The runner over real (tiny) models: greedy output against Hugging Face generate, draws, copies, failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy
from common.contracts.types import TRIMMED, BlockId, KvGeometry, SamplingParams, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import AttentionBackend, LayerAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.runner.thread_executor import ThreadExecutor
from gpuworker.sampling.native_sampler import RowFollower
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.scheduling.batch_plan import ScheduledRow, StepNotBuilt, StepPlan
from tests.support.checkpoints import EOS, REPRESENTATIVES, SERVED, VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.gpuworker.runner_harness import GREEDY, Driver, queued_on, runner_on, transformers_model

A, B = SequenceId(1), SequenceId(2)
LLAMA = "llama"


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(sum(lengths))
    return [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]


NewRunner = Callable[..., ModelRunner]


def thread_runner(max_model_len: int = 256, eos: tuple[int, ...] = ()) -> ModelRunner:
    return runner_on(transformers_model(checkpoint(LLAMA)), max_model_len=max_model_len, eos=eos)


def queue_runner(max_model_len: int = 256, eos: tuple[int, ...] = ()) -> ModelRunner:
    return queued_on(checkpoint(LLAMA), max_model_len=max_model_len, eos=eos)


@pytest.fixture(params=["thread", "queue"])
def llama_runner(request: pytest.FixtureRequest) -> NewRunner:
    """What makes a runner of steps that a Python thread launches, or that are queued natively."""
    if request.param == "queue" and best() is None:
        pytest.skip("the native library was not built")
    return queue_runner if request.param == "queue" else thread_runner


def decode(sequence: SequenceId, position: int, blocks: Sequence[int]) -> ScheduledRow:
    return ScheduledRow(sequence, position, 1, tuple(BlockId(block) for block in blocks), samples=True)


def prefill(sequence: SequenceId, start: int, length: int, blocks: Sequence[int]) -> ScheduledRow:
    return ScheduledRow(sequence, start, length, tuple(BlockId(block) for block in blocks), samples=True)


# ---------------------------------------------------------------- greedy output equals generate


def sizes_of(kind: str) -> tuple[int, ...]:
    """Return the sizes of blocks that `.ci/run` tries with a kind of model."""
    return (4, 64) if kind in REPRESENTATIVES else (16,)


KINDS_AND_BLOCKS = [
    pytest.param(kind, size, marks=() if size in sizes_of(kind) else pytest.mark.exhaustive)
    for kind in SERVED
    for size in (4, 16, 64, 256)
]


@pytest.mark.parametrize(("kind", "block_size"), KINDS_AND_BLOCKS)
def test_greedy_output_of_a_mixed_batch_equals_generate(kind: str, block_size: int) -> None:
    runner = runner_on(transformers_model(checkpoint(kind)), block_size)
    driver = Driver(runner, block_size)
    chunked = zip(prompts(3, 41, 70, 17), (99, 7, 13, 1), strict=True)
    cases = [(prompt, 24 - n, chunk) for n, (prompt, chunk) in enumerate(chunked)]
    streams = [driver.add(*case) for case in cases]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [hf_greedy(checkpoint(kind), p, count) for p, count, _ in cases]


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_greedy_output_of_queued_steps_equals_generate(kind: str, block_size: int) -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    runner = queued_on(checkpoint(kind), block_size)
    driver = Driver(runner, block_size)
    cases = [(prompt, 20 - n, 9) for n, prompt in enumerate(prompts(3, 41, 70, 17))]
    streams = [driver.add(*case) for case in cases]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [hf_greedy(checkpoint(kind), p, count) for p, count, _ in cases]


@pytest.mark.parametrize(
    "kind", [kind if kind in REPRESENTATIVES else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in SERVED]
)
def test_greedy_output_alone_equals_generate(kind: str) -> None:
    runner = runner_on(transformers_model(checkpoint(kind)))
    driver = Driver(runner)
    (prompt,) = prompts(37)
    stream = driver.add(prompt, 40)
    driver.run()
    runner.close()
    assert stream.output == hf_greedy(checkpoint(kind), prompt, 40)
    assert len(set(stream.output)) > 5


def test_a_sequence_that_joins_late_changes_nobodys_tokens(llama_runner: NewRunner) -> None:
    runner = llama_runner()
    driver = Driver(runner)
    first_prompt, second_prompt = prompts(20, 33)
    first = driver.add(first_prompt, 30)
    for _ in range(9):
        future = driver.step()
        assert future is not None
        driver.take(future.result(timeout=60))
    second = driver.add(second_prompt, 12, chunk=10)
    driver.run()
    runner.close()
    assert first.output == hf_greedy(checkpoint(LLAMA), first_prompt, 30)
    assert second.output == hf_greedy(checkpoint(LLAMA), second_prompt, 12)


def test_trimmed_blocks_are_not_read() -> None:
    """Every layer of mistral slides over eight positions: a decode at 39 needs nothing before block 2."""
    runner = runner_on(transformers_model(checkpoint("mistral")))
    (prompt,) = prompts(39)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.submit_step(StepPlan(1, (prefill(A, 0, 39, [5, 3, 8]),))).result(timeout=60)
    result = runner.submit_step(StepPlan(2, (decode(A, 39, [TRIMMED, TRIMMED, 8]),))).result(timeout=60)
    runner.close()
    assert result.sampled == {A: (hf_greedy(checkpoint("mistral"), prompt, 2)[1],)}


# ---------------------------------------------------------------- the rest of the port


def test_a_step_that_samples_nothing_draws_nothing(llama_runner: NewRunner) -> None:
    runner = llama_runner()
    (prompt,) = prompts(9)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    row = ScheduledRow(A, 0, 4, (BlockId(0),), samples=False)
    result = runner.submit_step(StepPlan(7, (row,))).result(timeout=60)
    runner.close()
    assert (result.step, result.sampled, result.logprobs) == (7, {}, {})


def test_a_step_may_consist_of_copies_alone(llama_runner: NewRunner) -> None:
    runner = llama_runner()
    (prompt,) = prompts(9)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    first = runner.submit_step(StepPlan(1, (prefill(A, 0, 9, [0]),))).result(timeout=60)
    runner.submit_step(StepPlan(2, (), (Copy(BlockId(0), BlockId(4), 8),))).result(timeout=60)
    again = runner.submit_step(StepPlan(3, (decode(A, 8, [4]),))).result(timeout=60)
    runner.close()
    assert again.sampled == first.sampled


def test_a_step_that_cannot_be_laid_out_names_the_sequences_that_fail_alone_and_runs_nothing(
    llama_runner: NewRunner,
) -> None:
    """The runner does not know B. Without it the same step runs, and nothing was written or drawn before."""
    runner = llama_runner()
    (first,) = prompts(9)
    runner.add_sequence(A, first, GREEDY, len(first))
    innocent = prefill(A, 0, 9, [0])
    with pytest.raises(StepNotBuilt) as refused:
        runner.submit_step(StepPlan(1, (innocent, prefill(B, 0, 21, [1]))))
    assert refused.value.culprits == {B}
    result = runner.submit_step(StepPlan(2, (innocent,))).result(timeout=60)
    runner.close()
    assert result.sampled == {A: (hf_greedy(checkpoint(LLAMA), first, 1)[0],)}


def test_copies_come_before_the_rows_of_their_step(llama_runner: NewRunner) -> None:
    runner = llama_runner()
    (prompt,) = prompts(9)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    first = runner.submit_step(StepPlan(1, (prefill(A, 0, 9, [0]),))).result(timeout=60)
    runner.add_sequence(B, prompt, GREEDY, len(prompt))
    plan = StepPlan(2, (decode(B, 8, [4]),), (Copy(BlockId(0), BlockId(4), 8),))
    assert runner.submit_step(plan).result(timeout=60).sampled == {B: first.sampled[A]}
    runner.close()


def test_a_sequence_that_comes_back_brings_its_tokens(llama_runner: NewRunner) -> None:
    """Preempted and admitted again: prompt and output so far are prefilled, and the next token is the same."""
    runner = llama_runner()
    (prompt,) = prompts(21)
    expected = hf_greedy(checkpoint(LLAMA), prompt, 6)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.submit_step(StepPlan(1, (prefill(A, 0, 21, [0, 1]),))).result(timeout=60)
    runner.remove(A)
    runner.add_sequence(A, [*prompt, *expected[:5]], GREEDY, len(prompt))
    result = runner.submit_step(StepPlan(2, (prefill(A, 0, 26, [7, 9]),))).result(timeout=60)
    runner.close()
    assert result.sampled == {A: (expected[5],)}


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=seed, logprobs=2)


def test_draws_do_not_depend_on_the_batch(llama_runner: NewRunner) -> None:
    together: list[list[int]] = []
    alone: list[list[int]] = []
    for group in ([0, 1, 2], [0], [1], [2]):
        runner = llama_runner()
        driver = Driver(runner, seed=len(group))
        streams = [driver.add(prompts(10 + n)[0], 20, chunk=4 + len(group), sampling=sampled(n)) for n in group]
        driver.run()
        runner.close()
        (together if len(group) == 3 else alone).extend(stream.output for stream in streams)
    assert together == alone


def test_log_probabilities_come_with_the_tokens_that_asked(llama_runner: NewRunner) -> None:
    runner = llama_runner()
    (prompt,) = prompts(11)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.add_sequence(B, prompt, SamplingParams(temperature=0.0, logprobs=3), len(prompt))
    result = runner.submit_step(StepPlan(1, (prefill(A, 0, 11, [0]), prefill(B, 0, 11, [1])))).result(timeout=60)
    runner.close()
    ((found,),) = result.logprobs.values()
    assert list(result.logprobs) == [B]
    assert (found.token_id,) == result.sampled[B]
    assert found.top[0] == (found.token_id, found.logprob)
    assert len(found.top) == 3


def test_samplers_are_made_once_for_each_number_of_drafts(
    llama_runner: NewRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(SamplingBatch):
        def __init__(
            self,
            rows: Sequence[SampledRow],
            vocab_size: int,
            device: torch.device,
            followers: Sequence[RowFollower | None] = (),
        ) -> None:
            made.append(len(rows))
            super().__init__(rows, vocab_size, device, followers)

    monkeypatch.setattr("gpuworker.runner.model_runner.SamplingBatch", Counted)
    runner = llama_runner()
    (prompt,) = prompts(11)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.submit_step(StepPlan(1, (prefill(A, 0, 11, [0]),))).result(timeout=60)
    for step, drafts in enumerate([(), (1, 2), (), (3, 4)], start=2):
        row = decode(A, 11, [0])._replace(drafts=drafts)
        runner.submit_step(StepPlan(step, (row,), drafts=len(drafts))).result(timeout=60)
    runner.close()
    assert made == [1, 3]


def test_the_models_own_end_is_forbidden_before_min_tokens(llama_runner: NewRunner) -> None:
    runner = llama_runner(eos=(EOS,))
    (prompt,) = prompts(11)
    wants_end = ((EOS, 100.0),)
    runner.add_sequence(A, prompt, SamplingParams(temperature=0.0, logit_bias=wants_end, min_tokens=2), len(prompt))
    sampled = [runner.submit_step(StepPlan(1, (prefill(A, 0, 11, [0]),)))]
    sampled += [runner.submit_step(StepPlan(2 + n, (decode(A, 11 + n, [0]),))) for n in range(2)]
    tokens = [future.result(timeout=60).sampled[A][0] for future in sampled]
    runner.close()
    assert [token == EOS for token in tokens] == [False, False, True]


def test_the_runners_thread_has_the_threads_that_were_asked_for() -> None:
    runner = thread_runner()
    counts: list[int] = []
    assert isinstance(runner.executor, ThreadExecutor)
    runner.executor._thread.put(lambda: counts.append(torch.get_num_threads()))
    runner.close()
    assert counts == [1]


def test_what_the_collector_puts_into_words_comes_in_order_with_the_rest(llama_runner: NewRunner) -> None:
    """Steps with log-probabilities are put into words by the collector's thread, those without by the runner's."""
    runner = llama_runner()
    driver = Driver(runner)
    (prompt, other) = prompts(37, 21)
    asking = SamplingParams(temperature=0.0, logprobs=1)
    streams = [driver.add(prompt, 20, chunk=9), driver.add(other, 8, sampling=asking)]
    driver.run()
    runner.close()
    expected = [hf_greedy(checkpoint(LLAMA), prompt, 20), hf_greedy(checkpoint(LLAMA), other, 8)]
    assert [stream.output for stream in streams] == expected


# ---------------------------------------------------------------- failures


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While the list is not empty, attention fails."""
    switch: list[bool] = []
    used = type(make_backend("auto", KvCache(KvGeometry(1, 1, 16, 16, "float32"), 1, 16, torch.device("cpu"))))
    right = used.write_and_attend

    def fail(
        self: AttentionBackend, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if switch:
            raise RuntimeError("the device is gone")
        return right(self, layer, query, key, value)

    monkeypatch.setattr(used, "write_and_attend", fail)
    return switch


def two_steps(runner: ModelRunner) -> list[StepPlan]:
    (prompt,) = prompts(9)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    return [StepPlan(1, (prefill(A, 0, 9, [0]),)), StepPlan(2, (decode(A, 9, [0]),))]


def test_a_failed_step_fails_those_behind_it(broken: list[bool]) -> None:
    runner = thread_runner()
    plans = two_steps(runner)
    broken.append(True)
    first, second = (runner.submit_step(plan) for plan in plans)
    with pytest.raises(EngineFailure, match="the device is gone"):
        first.result(timeout=60)
    broken.clear()
    with pytest.raises(EngineFailure, match="before this one"):
        second.result(timeout=60)
    runner.close()


def test_a_queued_step_that_fails_fails_those_behind_it_until_its_sequences_are_gone() -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    runner = queue_runner()
    runner.add_sequence(A, [VOCAB_SIZE + 5] * 9, GREEDY, 9)
    futures = [runner.submit_step(StepPlan(n, (prefill(A, 0, 9, [0]),))) for n in (1, 2)]
    with pytest.raises(EngineFailure, match="has a token that the model does not know"):
        futures[0].result(timeout=60)
    late = runner.submit_step(StepPlan(3, (prefill(A, 0, 9, [0]),)))
    for future in (futures[1], late):
        with pytest.raises(EngineFailure, match="before this one"):
            future.result(timeout=60)
    runner.remove(A)
    tokens = [runner.submit_step(plan).result(timeout=60).sampled[A][0] for plan in two_steps(runner)]
    runner.close()
    assert tokens == hf_greedy(checkpoint(LLAMA), prompts(9)[0], 2)


def test_the_runner_goes_on_once_every_sequence_of_the_failure_is_removed(broken: list[bool]) -> None:
    runner = thread_runner()
    plans = two_steps(runner)
    broken.append(True)
    futures = [runner.submit_step(plan) for plan in plans]
    assert all(isinstance(future.exception(timeout=60), EngineFailure) for future in futures)
    broken.clear()
    runner.remove(A)
    tokens = [runner.submit_step(plan).result(timeout=60).sampled[A][0] for plan in two_steps(runner)]
    runner.close()
    assert tokens == hf_greedy(checkpoint(LLAMA), prompts(9)[0], 2)


def test_more_tokens_than_a_row_of_the_table_holds_are_the_callers_mistake(llama_runner: NewRunner) -> None:
    runner = llama_runner(max_model_len=8)
    with pytest.raises(ValueError, match="has 9 tokens; 8 fit"):
        runner.add_sequence(A, prompts(9)[0], GREEDY, 9)
    runner.close()

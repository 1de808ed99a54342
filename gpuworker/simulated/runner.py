"""A step runner without a model: a step takes the time of a cost model, and its tokens are known beforehand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from common.contracts.lease import TierCopy
from common.contracts.types import SamplingParams, SequenceId, TokenLogprobs
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.serial_thread import SerialThread
from gpuworker.simulated.memory import SimulatedMemory
from gpuworker.simulated.tokens import SimulatedTokens


class SimulatedRunner:
    """Implements `StepRunner`. As on a device, a step begins when the previous one is over; a thread sleeps its time.

    Late wake-ups do not add up: the next step is due at its nominal time. `held` is the seconds of a step that hold the
    GIL, as Python code beside kernels would. Requested log-probabilities are 0: one token is certain, in prompts too.
    With a `memory`, a sequence that reads what is not its own there gets the token after the right one.
    """

    def __init__(
        self, costs: StepCosts, tokens: SimulatedTokens, held: float = 0.0, memory: SimulatedMemory | None = None
    ) -> None:
        self._costs, self._tokens, self._held, self._memory = costs, tokens, held, memory
        self._phases: dict[SequenceId, int] = {}
        self._telling: set[SequenceId] = set()  # sequences that asked for log-probabilities
        self._prompts: dict[SequenceId, tuple[int, ...]] = {}  # of those that asked for their log-probabilities
        self._due = 0.0
        self._thread = SerialThread("simulated-step")

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        self._phases[sequence] = self._tokens.phase(sampling.seed)
        if self._memory is not None:
            self._memory.add_sequence(sequence, tokens)
        if sampling.logprobs is not None:
            self._telling.add(sequence)
        if sampling.prompt_logprobs is not None:
            self._prompts[sequence] = tuple(tokens[:prompt_tokens])

    def remove(self, sequence: SequenceId) -> None:
        self._phases.pop(sequence, None)
        if self._memory is not None:
            self._memory.remove(sequence)
        self._telling.discard(sequence)
        self._prompts.pop(sequence, None)

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        sampled = self._sample(plan) if self._memory is None else self._sample_with(self._memory, plan)
        logprobs = (
            {each: (_sure(sampled[each][0]),) for each in self._telling & sampled.keys()} if self._telling else {}
        )
        frames = sum([isinstance(each, TierCopy) for each in plan.copies]) if plan.copies else 0
        seconds, copying = self._costs.of(len(sampled), plan.prefilled), self._costs.frame * frames
        result = StepResult(plan.step, sampled, logprobs, seconds, copy_seconds=copying)
        if plan.scored:
            result = replace(result, prompt_logprobs=self._scores(plan))
        submitted = time.perf_counter()
        self._thread.put(lambda: self._run(result, submitted, future))
        return future

    def close(self) -> None:
        self._thread.close()

    def _sample(self, plan: StepPlan) -> dict[SequenceId, tuple[int, ...]]:
        phases, sampled, count = self._phases, self._tokens.sampled, self._tokens.count
        return {
            sequence: sampled[(phases[sequence] + start + length) % count]
            for sequence, start, length, _, samples, *_ in plan.rows
            if samples
        }

    def _sample_with(self, memory: SimulatedMemory, plan: StepPlan) -> dict[SequenceId, tuple[int, ...]]:
        sampled: dict[SequenceId, tuple[int, ...]] = {}
        memory.copy(plan.copies)
        memory.load(plan)
        for row in plan.rows:
            is_right = memory.run(row)
            if row.samples:
                place = self._phases[row.sequence] + row.start + row.length + (not is_right)
                sampled[row.sequence] = self._tokens.sampled[place % self._tokens.count]
                memory.append(row.sequence, *sampled[row.sequence])
        memory.save(plan)
        return sampled

    def _scores(self, plan: StepPlan) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
        parts = [(plan.rows[part.row].sequence, part) for part in plan.scored]
        return {
            sequence: tuple([replace(_sure(token), rank=1) for token in self._prompts[sequence][start + 1 : end + 1]])
            for sequence, (_, start, end) in parts
        }

    def _run(self, result: StepResult, submitted: float, future: Future[StepResult]) -> None:
        began = max(submitted, self._due)
        self._due = began + result.copy_seconds + result.seconds
        hold_until = time.perf_counter() + self._held
        while time.perf_counter() < hold_until:
            pass  # a loop of bytecode keeps the GIL unless another thread has asked for it for 5 ms
        time.sleep(max(0.0, self._due - time.perf_counter()))
        future.set_result(result)


def _sure(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, 0.0, ((token, 0.0),))

"""The outputs of one turn of the engine's loop, until they go to the sink."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.contracts.lease import Admit
from common.contracts.types import SequenceId, TokenLogprobs
from gpuworker.engine.ports import Chunk, Delayed, EngineOutputs, Started, StepRecord
from gpuworker.scheduling.outcomes import SequenceFinished


@dataclass(slots=True)
class GatheredOutputs:
    """The outputs of one turn of the engine's loop."""

    admitted: list[Admit] = field(default_factory=list)
    tokens: list[tuple[SequenceId, tuple[int, ...]]] = field(default_factory=list)
    logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    finished: list[SequenceFinished] = field(default_factory=list)
    preempted: list[SequenceId] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    recounted: dict[SequenceId, int] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    delayed: list[Delayed] = field(default_factory=list)

    def __bool__(self) -> bool:
        events = self.tokens or self.admitted or self.finished or self.preempted or self.chunks
        return bool(events or self.prompt_logprobs or self.recounted or self.started or self.steps or self.delayed)

    def pack(self, step: int, at: float = 0.0, lost: float = 0.0) -> EngineOutputs:
        """Return the gathered outputs and clear them; `at` and `lost` are those of EngineOutputs."""
        outputs = EngineOutputs(
            step,
            tuple(self.admitted),
            tuple(self.tokens),
            _tuples(self.logprobs),
            tuple(self.finished),
            tuple(self.preempted),
            tuple(self.chunks),
            _tuples(self.prompt_logprobs),
            self.recounted.copy(),
            tuple(self.started),
            tuple(self.steps),
            tuple(self.delayed),
            at,
            lost,
        )
        for part in (self.admitted, self.tokens, self.finished, self.preempted, self.chunks):
            part.clear()
        for told in (self.started, self.steps, self.delayed):
            told.clear()
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        self.recounted.clear()
        return outputs


def _tuples(lists: dict[SequenceId, list[TokenLogprobs]]) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
    return {sequence: tuple(each) for sequence, each in lists.items()}

"""What traced sequences did in their steps: a prefill chunk is told at once, all decode steps together at the end."""

from __future__ import annotations

from collections.abc import Collection

from common.contracts.types import SequenceId
from gpuworker.engine.ports import Chunk
from gpuworker.scheduling.batch_plan import StepPlan


class _Traced:
    """One traced sequence: the length of its prompt, and the sum of its decode steps."""

    __slots__ = ("begin_ns", "drafts", "end_ns", "prompt_tokens", "start", "steps")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.begin_ns = self.end_ns = self.start = self.steps = self.drafts = 0


class TracedSteps:
    """The traced sequences of an engine. A decode step of one costs no object: it is added to a sum."""

    def __init__(self) -> None:
        self._traced: dict[SequenceId, _Traced] = {}

    def __bool__(self) -> bool:
        return bool(self._traced)

    def follow(self, sequence: SequenceId, prompt_tokens: int) -> None:
        """Trace a sequence from now on."""
        self._traced[sequence] = _Traced(prompt_tokens)

    def stepped(self, plan: StepPlan, begin_ns: int, end_ns: int) -> list[Chunk]:
        """Take in a step; return what its rows computed of prompts, or anew after a preemption."""
        chunks, find = list[Chunk](), self._traced.get
        # Rows are unpacked, and hold few conditions: a step has a row for each sequence.
        for sequence, start, length, _, samples, drafts in plan.rows:
            one = find(sequence)
            if one is None:
                continue
            if samples and length == 1 and start >= one.prompt_tokens:
                if not one.steps:
                    one.begin_ns, one.start = begin_ns, start
                one.end_ns = end_ns
                one.steps += 1
                if drafts:
                    one.drafts += len(drafts)
            else:
                chunks.append(Chunk(sequence, start, length, begin_ns, end_ns, drafts=len(drafts)))
        return chunks

    def among(self, plan: StepPlan) -> tuple[SequenceId, ...]:
        """Return the traced sequences of a step."""
        return tuple(row.sequence for row in plan.rows if row.sequence in self._traced)

    def ended(self, sequence: SequenceId) -> tuple[Chunk, ...]:
        """Forget a sequence; return its decode steps, if it was traced and had any."""
        one = self._traced.pop(sequence, None)
        if one is None or not one.steps:
            return ()
        # The wall clock may have been set back since the first step.
        end_ns = max(one.begin_ns, one.end_ns)
        return (Chunk(sequence, one.start, one.steps, one.begin_ns, end_ns, True, one.drafts, one.steps),)

    def keep(self, sequences: Collection[SequenceId]) -> None:
        """Forget all others."""
        self._traced = {each: one for each, one in self._traced.items() if each in sequences}

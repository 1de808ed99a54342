"""A Frontend that plays a script, in place of admission, routing and workers, and records its requests."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace

from common.contracts.errors import QuireError
from common.contracts.types import FinishReason, MissReason, TokenLogprobs, Usage
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.embedding import packed
from router.contracts.events import Admitted, Finished, GenerateEvent, Timings, Tokens, ValidatedRequest
from router.contracts.ports import CallContext, Resumed

TIMINGS = Timings(0.0, 0.1, 0.01, 0.2)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
Step = GenerateEvent | QuireError | asyncio.Event
Script = Callable[[ValidatedRequest], Iterable[Step]]


def admitted(request: ValidatedRequest, cached: int = 0) -> Admitted:
    return Admitted(
        request_id=request.request_id or "made-up",
        worker_id="worker-0",
        prompt_tokens=len(request.prompt),
        cached_tokens=cached,
        queue_seconds=0.0,
        decision_id="d1",
        trace_id=TRACE_ID,
        seed=request.sampling.seed,
        miss_reason=MissReason.NEVER_SEEN,
    )


def tokens(text: str, *ids: int, index: int = 0, logprobs: tuple[TokenLogprobs, ...] = ()) -> Tokens:
    return Tokens(index, text, ids or (7,), logprobs)


def finished(
    output: int,
    index: int = 0,
    reason: FinishReason = FinishReason.STOP,
    stop: str | None = None,
    message: str = "",
    cached: int = 0,
) -> Finished:
    usage = Usage(output_tokens=output, cached_tokens=cached)
    return Finished(index, reason, usage, TIMINGS, stop_string=stop, message=message)


def embedded(*numbers: float) -> Finished:
    """Return the end of a request that embeds."""
    return Finished(0, FinishReason.STOP, Usage(prompt_tokens=3), TIMINGS, embedding=packed(array("f", numbers)))


def _short_answer(request: ValidatedRequest) -> list[Step]:
    if request.embeds:
        return [admitted(request), embedded(0.6, 0.8)]
    return [admitted(request), tokens("Hello"), tokens(" world"), finished(2)]


class ScriptedFrontend:
    """Yields a script's events, raises its errors, and waits at its asyncio.Events."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Return to the script of a short answer, or of a vector; clear the recorded requests."""
        self.script: Script = _short_answer
        self.requests: list[ValidatedRequest] = []
        # Set when the script waits, and when a request has ended for any reason.
        self.reached, self.closed = asyncio.Event(), asyncio.Event()
        self.ended = 0

    async def generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.requests.append(request)
        try:
            for step in self.script(request):
                if isinstance(step, QuireError):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.reached.set()
                    await step.wait()
                else:
                    yield step
        finally:
            self.ended += 1
            self.closed.set()


class ScriptedResumer:
    """Resumes the last request of a frontend: its script plays again, from its beginning."""

    def __init__(self, frontend: ScriptedFrontend) -> None:
        self._frontend = frontend
        self.asked: list[pb.Resume] = []
        self.refuses: QuireError | None = None

    async def resumed(self, request: pb.GenerateRequest, call: CallContext, again: bool = False) -> Resumed:
        assert again, "an API of events reads the whole output"
        self.asked.append(request.resume)
        if self.refuses is not None:
            raise self.refuses
        last = self._frontend.requests[-1]
        return Resumed(replace(last, new_parser=None), self._frontend.generate)

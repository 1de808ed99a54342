"""A router goes on with a request whose router died: real routers over one real worker, whose steps a test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest

from common.contracts.errors import AlreadyExists, InvalidRequest, NotFound, QuireError, Unavailable
from common.contracts.types import DecisionKind, FinishReason, SamplingParams
from common.process.ports import free_ports
from common.wire.identity_codec import identity_to_proto
from gpuworker.scheduling.batch_plan import StepPlan
from gpuworker.server.orphans import OrphanEnd
from gpuworker.server.router_stream import RouterStream
from gpuworker.server.servicer import Serving
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.assembler import OutputText
from router.contracts.answer_parts import Parser
from router.contracts.events import Admitted, GenerateEvent, ValidatedRequest
from router.contracts.ports import CallContext, TextAssembler
from router.contracts.session_ids import session_name
from router.requests.resumption import Resumption
from router.tenants.tenancy import Caller, Tenant
from router.workers import pool as pool_module
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.gpuworker.worker_harness import IDENTITY, LIMITS, PATIENCE, Served, served
from tests.support.router.fake_worker import FakeWorker, running
from tests.support.router.frontend_harness import (
    CLOCK,
    Harness,
    ends_of,
    frontend_over,
    request,
    text_of,
    tokens_of,
    until_nothing_left,
)
from tests.support.turns import until_idle
from tests.support.waiting import until

LONG = 3600.0
ANA, BOB = (Caller(Tenant(name, cache_domain=name.encode()), credential=name) for name in ("ana", "bob"))


class Letters:
    """A detokenizer: token 0 is a, 1 is b, and so on."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def finish(self) -> str:
        return ""


class LetterAssemblers:
    def assembler(
        self,
        sampling: SamplingParams,
        kept: Collection[str] = (),
        skip: bool = True,
        after: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> TextAssembler:
        return OutputText(Letters(), sampling)


@dataclass
class AtAddress:
    """A worker that runs already."""

    address: str

    async def start(self) -> None: ...

    async def kill(self) -> None: ...


class World:
    """A worker, and routers that come and die. A step samples its own number."""

    def __init__(self, worker: Served, runner: Numbering, stack: AsyncExitStack) -> None:
        self.worker, self.runner, self._stack, self._routers = worker, runner, stack, 0
        self._sampled_before = 0

    async def router(self) -> Harness:
        self._routers += 1
        harness = frontend_over(
            AtAddress(self.worker.address),
            identity=IDENTITY,
            assemblers=LetterAssemblers(),
            incarnation=bytes([self._routers]) * 16,
        )
        return await self._stack.enter_async_context(harness)

    async def begun(self, router: Harness, wanted: ValidatedRequest, tokens: int) -> list[GenerateEvent]:
        """Let a router run a request until every sequence has so many tokens; return what its client has by then.

        What the router yields later never reaches the client.
        """
        seen: list[GenerateEvent] = []

        async def run() -> None:
            async with aclosing(router.frontend.generate(wanted)) as events:
                async for event in events:
                    seen.append(event)  # noqa: PERF401 - others look at what there is

        self._task = self._stack.enter_context(_Running(asyncio.create_task(run())))
        self._sampled_before = self.runner.sampled
        await self.step_until(
            router, lambda: all(len(tokens_of(seen, each)) >= tokens for each in range(wanted.sampling.n))
        )
        return list(seen)

    async def step_until(self, router: Harness, condition: Callable[[], bool]) -> None:
        """Complete steps until something holds, each once the router has the tokens of those before.

        Steps that come as fast as they can end the request before a slow router has acted.
        """

        def received() -> int:
            return sum(len(each.output.tokens) for run in router.frontend._runs for each in run.sequences)

        def look() -> bool:
            if condition():
                return True
            if self.runner.submitted and received() >= self.runner.sampled - self._sampled_before:
                self.runner.step()
            return False

        await until(look, every=0.002, seconds=PATIENCE)

    async def dies(self, router: Harness) -> None:
        """End a router's connections without a word; its clients get nothing more."""
        before = self.worker.servicer.orphans.outcomes[OrphanEnd.KEPT]
        for member in router.pool.members():
            assert member.task is not None
            member.task.cancel()
        await self.worker.until(lambda: self.worker.servicer.orphans.outcomes[OrphanEnd.KEPT] > before)

    async def finish(self) -> None:
        self.runner.release()


class Numbering(ManualRunner):
    """Samples in each step its number, and counts the tokens."""

    def __init__(self) -> None:
        super().__init__(self._sample)
        self.sampled = 0

    def _sample(self, plan: StepPlan) -> int:
        self.sampled += 1
        return plan.step % 26


class _Running:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def __enter__(self) -> asyncio.Task[None]:
        return self._task

    def __exit__(self, *_: object) -> None:
        self._task.cancel()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    runner = Numbering()
    async with AsyncExitStack() as stack, served(runner, loaded=False, orphan_grace=LONG) as worker:
        info = worker_pb.WorkerInfo(
            worker_id="w0",
            incarnation=b"w" * 16,
            identity=identity_to_proto(IDENTITY),
            num_blocks=16,
            max_model_len=64,
            max_num_seqs=4,
            vocab_size=100,
        )
        worker.servicer.serve(Serving(worker.engine, lambda: info, LIMITS, worker_pb.MemoryPlan()))
        async with stack:
            yield World(worker, runner, stack)
            runner.release()
            worker.servicer.orphans.close()


def wanted(**fields: object) -> ValidatedRequest:
    given: dict[str, object] = {"prompt": 5, "max_tokens": 12, "request_id": "r1", "caller": ANA}
    return request(**(given | {"cache_domain": b"ana"} | fields))  # type: ignore[arg-type]


def resume(*received: int, request_id: str = "r1", **fields: int) -> pb.GenerateRequest:
    asked = pb.Resume(request_id=request_id, output_tokens_received=received, **fields)
    return pb.GenerateRequest(resume=asked)


async def resumed(
    router: Harness, asked: pb.GenerateRequest, caller: Caller = ANA, search_seconds: float = 0.0
) -> list[GenerateEvent]:
    """Return everything that a resumed request yields. The workers are asked once."""
    resumption = Resumption(router.pool, CLOCK, search_seconds, answer_seconds=PATIENCE)
    found = await resumption.find(asked, CallContext(CLOCK.monotonic(), caller=caller))
    async with asyncio.timeout(PATIENCE), aclosing(router.frontend.resume(found)) as events:
        return [event async for event in events]


async def refused(router: Harness, asked: pb.GenerateRequest, caller: Caller = ANA) -> QuireError:
    with pytest.raises(QuireError) as caught:
        await resumed(router, asked, caller)
    return caught.value


def outcomes(router: Harness) -> list[str]:
    return [each.chosen for each in router.decisions.find(kind=DecisionKind.OUTCOME)]


async def test_the_client_gets_exactly_what_it_lacks() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 4)
        await whole.dies(first)
        await whole.finish()
        rest = await resumed(second, resume(len(tokens_of(seen))))
        admitted = rest[0]
        assert isinstance(admitted, Admitted)
        assert (admitted.request_id, admitted.worker_id, admitted.prompt_tokens) == ("r1", "w0", 5)
        tokens = tokens_of(seen) + tokens_of(rest)
        assert len(tokens) == 12
        assert tokens == list(range(tokens[0], tokens[0] + 12)), "a token was lost or came twice"
        assert text_of(seen) + text_of(rest) == Letters().push(tokens)
        end = ends_of(rest)[0]
        assert (end.reason, end.usage.output_tokens, end.usage.prompt_tokens) == (FinishReason.LENGTH, 12, 5)
        times = end.timings
        assert 0 <= times.queue_seconds <= times.time_to_first_token <= times.total_seconds
        await until_nothing_left(second)


async def test_records_say_that_the_request_was_moved_and_why() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 2)
        await whole.dies(first)
        await whole.finish()
        asked = resume(len(tokens_of(seen)))
        asked.session_id = "talk"  # workers are not told of sessions
        await resumed(second, asked)
        (move,) = second.decisions.find(kind=DecisionKind.MIGRATION)
        (end,) = second.decisions.find(kind=DecisionKind.OUTCOME)
        assert end.session == session_name(ANA.owner, "talk")
        assert (move.request_id, move.chosen) == ("r1", "w0")
        assert "router was lost" in move.reasons[0]
        assert dict(move.figures)["received_tokens"] == len(tokens_of(seen))
        assert outcomes(second) == ["length"]
        assert second.registry.get_sample_value("quire:requests_resumed_total") == 1
        assert second.registry.get_sample_value("quire:prompt_tokens_total") == 0


@pytest.mark.parametrize("behind", [0, 1, 3])
async def test_a_stop_string_across_the_break_ends_the_output(behind: int) -> None:
    """The client lacks some tokens that its router had; the stop string begins before the break and ends after it."""
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        probe = await whole.begun(first, wanted(request_id="probe", max_tokens=1), 1)
        begin = tokens_of(probe)[0] + 2
        stop = Letters().push(range(begin + 3, begin + 8))
        seen = await whole.begun(first, wanted(stop=(stop,)), 5)
        had = len(tokens_of(seen)) - behind
        await whole.dies(first)
        await whole.finish()
        rest = await resumed(second, resume(had))
        all_tokens = tokens_of(seen)[:had] + tokens_of(rest)
        assert ends_of(rest)[0].stop_string == stop
        assert Letters().push(all_tokens).endswith(stop)
        assert not text_of(rest).endswith(stop[0])


async def test_several_sequences_go_on_with_their_own_counts_and_one_that_ended_ends_again() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(n=3, max_tokens=6), 2)
        counts = [len(tokens_of(seen, index)) for index in range(3)]
        await whole.dies(first)
        await whole.finish()
        await whole.worker.until(lambda: whole.worker.servicer.live_sequences == 0)
        rest = await resumed(second, resume(*counts))
        assert sorted(ends_of(rest)) == [0, 1, 2]
        for index in range(3):
            assert len(tokens_of(seen, index)) + len(tokens_of(rest, index)) == 6


async def test_a_router_may_die_twice() -> None:
    async with world() as whole:
        routers = [await whole.router() for _ in range(3)]
        seen = await whole.begun(routers[0], wanted(), 2)
        await whole.dies(routers[0])
        task = asyncio.create_task(resumed(routers[1], resume(len(tokens_of(seen)))))
        await whole.worker.until(lambda: len(whole.worker.servicer.orphans) == 0)
        await whole.dies(routers[1])
        await whole.finish()
        rest = await resumed(routers[2], resume(len(tokens_of(seen))))
        assert len(tokens_of(seen) + tokens_of(rest)) == 12
        task.cancel()


async def test_another_tenants_request_is_as_unknown_as_none() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        await whole.begun(first, wanted(), 1)
        held = await refused(second, resume(1), BOB)
        await whole.dies(first)
        foreign, none = await refused(second, resume(1), BOB), await refused(second, resume(1, request_id="r2"))
        assert isinstance(foreign, NotFound)
        assert str(foreign).replace("r1", "r2") == str(held).replace("r1", "r2") == str(none)
        namesake = Caller(Tenant("ana", cache_domain=b"of another key"), credential="ana")
        assert str(await refused(second, resume(1), namesake)) == str(foreign)


async def test_while_the_first_router_lives_no_other_one_takes_its_request() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        await whole.begun(first, wanted(), 1)
        assert isinstance(await refused(second, resume(1)), AlreadyExists)
        assert isinstance(await refused(first, resume(1)), AlreadyExists)


async def test_a_router_that_dies_meanwhile_hands_over() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 1)
        task = asyncio.create_task(resumed(second, resume(len(tokens_of(seen))), search_seconds=PATIENCE))
        await whole.dies(first)
        await whole.finish()
        assert len(tokens_of(seen) + tokens_of(await task)) == 12


async def test_two_routers_that_resume_at_once_do_not_both_lose_the_request() -> None:
    """Each worker message of the second router comes between those of the first one."""
    async with world() as whole:
        first, second, third = [await whole.router() for _ in range(3)]
        seen = await whole.begun(first, wanted(n=2), 2)
        counts = [len(tokens_of(seen, index)) for index in range(2)]
        await whole.dies(first)
        adoptions = Adoptions(whole.worker)
        tasks = [asyncio.create_task(resumed(router, resume(*counts))) for router in (second, third)]
        await adoptions.interleave(second, third)
        await whole.finish()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        won = [result for result in results if not isinstance(result, BaseException)]
        assert len(won) == 1, results
        assert any(isinstance(result, AlreadyExists) for result in results)
        for index in range(2):
            assert len(tokens_of(seen, index)) + len(tokens_of(won[0], index)) == 12


class Adoptions:
    """Holds the adoptions that come to a worker, to let them pass in another order."""

    def __init__(self, worker: Served) -> None:
        self._worker, self._pass = worker, worker.servicer._adopt
        self._held: list[tuple[RouterStream, worker_pb.Adopt]] = []
        worker.servicer._adopt = lambda *given: self._held.append(given)  # type: ignore[method-assign]

    async def interleave(self, *routers: Harness) -> None:
        """Hold the first adoption of each router, and what it sends at once with it; then let all pass."""
        await self._worker.until(lambda: len({id(stream) for stream, _ in self._held}) == len(routers))
        # The worker answers in order: by then it has read all that a router sends without an answer.
        questions = [each.client.find_request("another", "") for router in routers for each in router.pool.members()]
        await asyncio.wait_for(asyncio.gather(*questions), PATIENCE)
        self._worker.servicer._adopt = self._pass  # type: ignore[method-assign]
        first = self._held.pop(0)
        for stream, message in (first, *reversed(self._held)):
            self._pass(stream, message)


async def test_a_router_that_stops_leaves_no_orphans_at_a_worker_that_reads_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "LAST_WORDS_S", PATIENCE)
    reads, held = asyncio.Event(), asyncio.Event()
    reads.set()
    async with world() as whole:
        original = whole.worker.servicer._read

        async def late(requests: AsyncIterator[worker_pb.StreamRequest]) -> AsyncIterator[worker_pb.StreamRequest]:
            async for each in requests:
                if not reads.is_set():
                    held.set()
                await reads.wait()
                yield each

        servicer = whole.worker.servicer
        monkeypatch.setattr(servicer, "_read", lambda one, requests, silence: original(one, late(requests), silence))
        first = await whole.router()
        await whole.begun(first, wanted(n=2), 1)
        reads.clear()
        closing = asyncio.create_task(first.pool.aclose())
        await asyncio.wait({closing, asyncio.ensure_future(held.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await until_idle()
        assert not closing.done(), "the router did not wait until its cancels were read"
        reads.set()
        async with asyncio.timeout(PATIENCE):
            await closing
        await whole.finish()
        await whole.worker.until(lambda: whole.worker.servicer.live_sequences == 0)
        assert not whole.worker.servicer.orphans.outcomes


async def test_a_dead_address_does_not_hold_up_the_answer_to_an_unknown_request() -> None:
    async with world() as whole:
        router, port = await whole.router(), free_ports(1)[0]
        router.pool.add_worker(f"127.0.0.1:{port}")
        await router.until(lambda: any(member.client.refused for member in router.pool.members()))
        with pytest.raises(NotFound, match=f"no request r9 .* no worker listens at 127.0.0.1:{port}"):
            await resumed(router, resume(request_id="r9"), search_seconds=PATIENCE)


async def test_a_worker_that_cannot_be_asked_leaves_it_open() -> None:
    silent = FakeWorker(worker_id="w1", greets=False)
    async with world() as whole, running(silent):
        router = await whole.router()
        router.pool.add_worker(silent.address)
        assert isinstance(await refused(router, resume()), Unavailable)


async def test_more_tokens_than_there_are_is_a_wrong_field_and_changes_nothing() -> None:
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 2)
        await whole.dies(first)
        wrong = await refused(second, resume(40, 1))
        assert isinstance(wrong, InvalidRequest)
        fields = {each.field: each.description for each in wrong.violations}
        assert "is 40" in fields["resume.output_tokens_received[0]"]
        assert "no such sequence" in fields["resume.output_tokens_received[1]"]
        await whole.finish()
        rest = await resumed(second, resume(len(tokens_of(seen))))
        assert len(tokens_of(seen) + tokens_of(rest)) == 12


async def test_what_stands_beside_resume_is_refused() -> None:
    async with world() as whole:
        router = await whole.router()
        asked = resume(*[0] * 65, request_id="with space")
        asked.priority, asked.session_id = 3, 257 * "x"
        wrong = await refused(router, asked)
        assert isinstance(wrong, InvalidRequest)
        names = [each.field for each in wrong.violations]
        assert names == ["resume.request_id", "resume.output_tokens_received", "session_id", "priority"]

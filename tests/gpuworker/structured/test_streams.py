"""Constraints on their way from a router to the engine: compiled off the loop, refused in words, cancelled mid-way."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from google.rpc import error_details_pb2, status_pb2

from common.contracts.types import Constraint
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, tokenizer
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ManualRunner
from tests.support.gpuworker.runner_harness import SLOTS, runner_on, transformers_model
from tests.support.gpuworker.worker_harness import LIMITS, RouterEnd, Served, served, submit

PROMPT = list(range(20, 31))
REGEX = "[a-f]{3}(-[0-9]{2}){2}"
INVALID_ARGUMENT, UNIMPLEMENTED = 3, 12


class SlowCompiler(GrammarCompiler):
    """Compiles when the test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, VOCAB_SIZE, (EOS,))
        self.asked: list[tuple[Constraint, Future[Grammar]]] = []

    def compile_soon(self, constraint: Constraint, tenant: str = "") -> Future[Grammar]:
        self.asked.append((constraint, Future()))
        return self.asked[-1][1]

    def go_on(self) -> None:
        """Compile the oldest that waits, as an executor does."""
        constraint, future = self.asked.pop(0)
        if future.set_running_or_notify_cancel():
            future.set_result(self.compile(constraint))

    def fail(self, error: BaseException) -> None:
        self.asked.pop(0)[1].set_exception(error)


def cancel(handle: int) -> pb.StreamRequest:
    return pb.StreamRequest(cancel=pb.Cancel(handle=handle, reason=types.FINISH_REASON_CANCELLED))


def tokenizer_json() -> Path:
    return checkpoint("llama") / "tokenizer.json"


@asynccontextmanager
async def slowly_compiling(runner: ManualRunner) -> AsyncIterator[tuple[Served, RouterEnd, SlowCompiler]]:
    """Run a worker whose constraints are compiled when the test says so, and one router's stream."""
    compiler = SlowCompiler(tokenizer_json())
    async with served(runner, loaded=False) as worker:
        worker.serve(LIMITS, compiler)
        async with worker.router() as router:
            yield worker, router, compiler


async def refusal(router: RouterEnd, handle: int) -> status_pb2.Status:
    message = await router.until("refused")
    assert message.refused.handle == handle
    return status_pb2.Status.FromString(message.refused.status)


async def test_a_constraint_is_followed_from_the_submit_on() -> None:
    runner = runner_on(transformers_model(checkpoint("llama")))
    grammars = GrammarCompiler(tokenizer_json(), VOCAB_SIZE, (EOS,))
    runner.constrain(grammars)
    config = AgentConfig(num_blocks=SLOTS // 16, block_size=4, max_num_seqs=8)
    async with served(runner, loaded=False, config=config) as worker:
        worker.serve(replace(LIMITS, max_model_len=256, vocab_size=VOCAB_SIZE), grammars)
        async with worker.router() as router:
            await router.send(*(submit(handle, PROMPT, 40, regex=REGEX, index=handle) for handle in (1, 2)))
            await router.until_finished(1, 2)
    for handle in (1, 2):
        assert re.fullmatch(REGEX, str(tokenizer().decode(router.tokens[handle])))
        assert router.finished[handle].reason == types.FINISH_REASON_STOP
        assert not router.finished[handle].HasField("stop_token_id")


async def test_a_constraint_that_does_not_compile_is_refused_and_others_go_on() -> None:
    async with served(InstantRunner(), loaded=False) as worker:
        worker.serve(LIMITS, GrammarCompiler(tokenizer_json(), VOCAB_SIZE, (EOS,)))
        async with worker.router() as router:
            await router.send(submit(1, PROMPT, 4, json_schema='{"type": "poem"}'), submit(2, PROMPT, 4))
            status = await refusal(router, 1)
            await router.until_finished(2)
    assert status.code == INVALID_ARGUMENT
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in status.details)
    assert [each.field for each in violations.field_violations] == ["json_schema"]
    assert "Invalid type: poem" in violations.field_violations[0].description


async def test_a_worker_that_follows_no_constraints_says_so() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 4, regex="ab"))
        assert (await refusal(router, 1)).code == UNIMPLEMENTED


async def test_others_overtake_a_sequence_whose_constraint_is_being_compiled() -> None:
    async with slowly_compiling(InstantRunner()) as (worker, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab"), submit(2, PROMPT, 4))
        await router.until_finished(2)
        assert router.tokens.keys() == {2}
        assert worker.servicer.live_sequences == 1
        compiler.go_on()
        await router.until_finished(1)


async def test_those_with_one_constraint_wait_for_one_compilation_and_keep_their_order() -> None:
    """A fork comes right behind the sequence whose blocks it shares."""
    async with slowly_compiling(InstantRunner()) as (worker, router, compiler):
        fork = submit(2, PROMPT, 4, regex="ab", index=1)
        fork.submit.fork_of = 1
        await router.send(submit(1, PROMPT, 4, regex="ab"), fork, submit(3, PROMPT, 4, regex="cd"))
        await worker.until(lambda: worker.servicer.live_sequences == 3)
        assert [constraint.text for constraint, _ in compiler.asked] == ["ab", "cd"]
        compiler.go_on()
        compiler.go_on()
        await router.until_finished(1, 2, 3)
    assert router.admitted[2].cached_tokens > 0


async def test_a_sequence_that_is_cancelled_while_it_waits_ends_at_once() -> None:
    async with slowly_compiling(InstantRunner()) as (_, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab"), submit(2, PROMPT, 4, regex="ab"))
        await router.send(cancel(1))
        await router.until_finished(1)
        assert router.finished[1].reason == types.FINISH_REASON_CANCELLED
        assert router.finished[1].usage.prompt_tokens == len(PROMPT)
        compiler.go_on()
        await router.until_finished(2)
    assert router.tokens.keys() == {2}


async def test_the_deadline_counts_from_the_submit() -> None:
    async with slowly_compiling(ManualRunner()) as (worker, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab", timeout_seconds=0.0))
        await worker.until(lambda: worker.servicer.live_sequences == 1)
        compiler.go_on()
        await router.until_finished(1)
    assert router.finished[1].reason == types.FINISH_REASON_DEADLINE


async def test_a_handle_that_waits_is_taken() -> None:
    async with slowly_compiling(InstantRunner()) as (_, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab"), submit(1, PROMPT, 4, regex="cd"))
        assert "handle 1 names a sequence of this stream already" in (await refusal(router, 1)).message
        compiler.go_on()
        await router.until_finished(1)


async def test_a_constraint_that_no_sequence_waits_for_is_not_compiled_and_may_come_again() -> None:
    async with slowly_compiling(InstantRunner()) as (worker, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab"), submit(2, PROMPT, 4, regex="ab"))
        await worker.until(lambda: worker.servicer.live_sequences == 2)
        await router.send(cancel(1))
        await router.until_finished(1)
        assert not compiler.asked[0][1].cancelled()
        await router.send(cancel(2), submit(3, PROMPT, 4, regex="ab"))
        await router.until_finished(2)
        await worker.until(lambda: len(compiler.asked) == 2)
        assert compiler.asked[0][1].cancelled()
        compiler.go_on()
        compiler.go_on()
        await router.until_finished(3)


async def test_constraints_that_wait_for_compilation_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuworker.server.router_stream.MAX_GRAMMARS_WAITING", 2)
    async with slowly_compiling(InstantRunner()) as (_, router, compiler):
        await router.send(*(submit(handle, PROMPT, 4, regex="a" * handle) for handle in (1, 2, 3)))
        assert "2 of 2 constraints of this router wait to be compiled" in (await refusal(router, 3)).message
        compiler.go_on()
        compiler.go_on()
        await router.until_finished(1, 2)


async def test_in_a_full_queue_the_longest_line_of_a_tenant_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuworker.server.router_stream.MAX_GRAMMARS_WAITING", 3)
    async with slowly_compiling(InstantRunner()) as (_, router, compiler):
        await router.send(*(submit(handle, PROMPT, 4, regex="a" * handle, tenant="many") for handle in (1, 2, 3)))
        await router.send(submit(4, PROMPT, 4, regex="b", tenant="few"))
        assert "3 of 3 constraints" in (await refusal(router, 3)).message
        await router.send(submit(5, PROMPT, 4, regex="c", tenant="few"))
        assert "3 of 3 constraints" in (await refusal(router, 5)).message
        assert [future.cancelled() for _, future in compiler.asked] == [False, False, True, False]
        for _ in range(4):
            compiler.go_on()
        await router.until_finished(1, 2, 4)


async def test_tenants_with_the_same_constraint_wait_for_turns_of_their_own() -> None:
    async with slowly_compiling(InstantRunner()) as (worker, router, compiler):
        await router.send(*(submit(handle, PROMPT, 4, regex="ab", tenant=f"t{handle}") for handle in (1, 2)))
        await worker.until(lambda: len(compiler.asked) == 2)
        compiler.asked.reverse()
        compiler.go_on()
        await router.until_finished(2)
        assert worker.servicer.live_sequences == 1
        compiler.go_on()
        await router.until_finished(1)


async def test_a_compiler_that_breaks_refuses_those_who_wait() -> None:
    async with slowly_compiling(InstantRunner()) as (worker, router, compiler):
        await router.send(submit(1, PROMPT, 4, regex="ab"))
        await worker.until(lambda: worker.servicer.live_sequences == 1)
        compiler.fail(RuntimeError("out of order"))
        assert "out of order" in (await refusal(router, 1)).message


async def test_a_router_that_goes_leaves_nothing_behind() -> None:
    compiler = SlowCompiler(tokenizer_json())
    async with served(InstantRunner(), loaded=False) as worker:
        worker.serve(LIMITS, compiler)
        async with worker.router() as router:
            await router.send(submit(1, PROMPT, 4, regex="ab"))
            await worker.until(lambda: worker.servicer.live_sequences == 1)
        await worker.until(lambda: worker.servicer.live_sequences == 0)
        compiler.go_on()

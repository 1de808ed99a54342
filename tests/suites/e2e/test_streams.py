"""A whole suite under load: many streams at once, cancels, deadlines, shared prefixes, and no state left behind."""

from __future__ import annotations

import asyncio
import random
import secrets

import grpc
import pytest

from cli.demo_model.prompts import questions, system_text
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.suites.e2e.conftest import WORKERS
from tests.support.load import placed, until_used
from tests.support.reference import assert_greedy, chat_tokens, tokenizer
from tests.support.suite import PATIENCE, Suite, chat, greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")


def prompts(count: int) -> list[list[int]]:
    """Return prompts of several lengths: half of them share a long system text."""
    asked = questions(8)
    whole, short = system_text(), system_text()[:200]
    return [chat_tokens(asked[i % 8].text, whole if i % 2 else short[: 40 + 5 * i]) for i in range(count)]


async def test_64_streams_give_the_tokens_of_transformers(suite: Suite) -> None:
    asked = prompts(64)
    outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, 24)) for prompt in asked))
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], 24)
    for name in ("worker-0", "worker-1"):
        await until_used(suite, name)
    for outcome in outcomes:
        assert outcome.finished is not None
        assert outcome.finished.reason == types.FINISH_REASON_LENGTH
        assert outcome.finished.usage.output_tokens == 24
    await suite.until_all_free(WORKERS)


async def test_the_second_prompt_with_the_same_prefix_hits_the_cache(suite: Suite) -> None:
    """Where the steps of that worker look slower, the router may rightly leave it: then another prefix is tried."""
    placed_at: set[str] = set()
    async with asyncio.timeout(PATIENCE):
        while len(placed_at) != 1:
            system = f"The old bridge {secrets.token_hex(4)} is safe. " + system_text()
            first, second = [await suite.generate(chat(q.text, system)) for q in questions(2)]
            placed_at = placed([first, second])
    assert first.admitted is not None
    assert second.admitted is not None
    assert first.admitted.cached_tokens < 16
    assert second.admitted.cached_tokens >= first.admitted.prompt_tokens // 16 * 16 - 32


async def test_300_random_cancels_leave_nothing_behind(suite: Suite) -> None:
    rng = random.Random(7)
    asked = prompts(64)

    async def cancelled_somewhere(index: int) -> None:
        call = suite.inference.Generate(greedy(asked[index % 64], 200), timeout=PATIENCE)
        wanted = rng.randrange(0, 12)
        seen = 0
        async for _ in call:
            seen += 1
            if seen > wanted:
                break
        call.cancel()

    for wave in range(0, 300, 60):
        await asyncio.gather(*(cancelled_somewhere(wave + i) for i in range(60)))
    await suite.until_all_free(WORKERS)


async def test_a_deadline_ends_the_stream_and_frees_the_blocks(suite: Suite) -> None:
    endless = greedy(prompts(1)[0], 3000)
    endless.sampling.n = 4  # 12,000 tokens take any worker longer than the deadline
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await suite.generate(endless, timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await suite.until_all_free(WORKERS)


async def test_sampling_depends_on_the_seed_alone(suite: Suite) -> None:
    prompt = prompts(2)[1]
    sampling = types.SamplingParams(temperature=1.3, seed=11, max_tokens=24, ignore_eos=True, n=2)
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling)
    alone = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE)
    crowd = asyncio.gather(*(suite.generate(greedy(each, 40)) for each in prompts(16)))
    again = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE)
    await crowd
    drawn = [[list(output.token_ids) for output in answer.outputs] for answer in (alone, again)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


async def test_text_arrives_whole_and_a_stop_string_ends_it(suite: Suite) -> None:
    question = questions(1)[0]
    free = await suite.generate(chat(question.text, system_text()))
    assert free.text == tokenizer().decode(free.tokens, skip_special_tokens=True)
    word = free.text.split()[2]
    request = chat(question.text, system_text())
    request.sampling.stop.append(word)
    stopped = await suite.generate(request)
    assert stopped.text == free.text[: free.text.index(word)]
    assert stopped.finished is not None
    assert stopped.finished.stop_string == word
    await suite.until_all_free(WORKERS)


async def test_one_trace_spans_the_three_services(suite: Suite) -> None:
    outcome = await suite.generate(chat("Hello!"))
    assert outcome.admitted is not None
    stub = suite.decisions
    query = decision_pb2.GetTraceRequest(trace_id=outcome.admitted.trace_id)
    wanted = {"queue", "stream", "reserve", "prefill chunk", "decode", "kvmanager.reserve"}
    names: set[str] = set()
    async with asyncio.timeout(PATIENCE):
        while not wanted <= names:
            answer = await stub.GetTrace(query, timeout=PATIENCE)
            names = {span.name for span in answer.spans}
            await asyncio.sleep(0.1)
    by_id = {span.span_id: span for span in answer.spans}
    roots = [span for span in answer.spans if span.parent_span_id not in by_id]
    assert len(roots) == 1
    events = {event.attributes["quire.decision.kind"] for span in answer.spans for event in span.events}
    assert {"routing", "grant"} <= events


async def test_prompt_text_is_in_no_log_line(suite: Suite) -> None:
    await suite.generate(chat("Where does Zebedeeson live?"))
    assert not [line for line in suite.lines if "Zebedee" in line]

"""Incidents of one worker, each produced for real: `quire why` names the true cause in its first three lines."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from tests.support.load import epoch, kill, manager_stopped
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import head_of, outcome_of, quire_why, until_blamed, until_placed

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 256
# Sequences that the router sends to the worker at once: twice its `--max-num-seqs`.
PLACES, QUEUE = 8, 2
names = (f"incident-{number:04}" for number in itertools.count())
_random = random.Random(17)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One simulated worker of 256 blocks and four slots."""
    worker = ("--kv-blocks", str(BLOCKS), "--max-num-seqs", "4", "--simulate", "base=4ms,prefill=400us")
    router = ("--max-queued-requests", str(QUEUE))
    options = StackOptions(model=CHECKPOINT, worker_flags=worker, router_flags=router)
    async with running_suite(tmp_path_factory.mktemp("incidents"), options) as running:
        yield running


def prompt(tokens: int) -> list[int]:
    """Return a prompt that no other test has."""
    return _random.choices(range(100, 400), k=tokens)


def named(tokens: list[int], max_tokens: int = 2) -> pb.GenerateRequest:
    request = greedy(tokens, max_tokens)
    request.request_id = next(names)
    return request


async def asked(suite: Suite, request: pb.GenerateRequest) -> str:
    """Serve a request to its end, and return its id."""
    await suite.generate(request)
    return request.request_id


@asynccontextmanager
async def streaming(suite: Suite, request: pb.GenerateRequest) -> AsyncIterator[asyncio.Task[Outcome]]:
    """Stream a request beside the test from its first token on; it is cancelled at the end if it still runs."""
    first = asyncio.Event()
    task = asyncio.create_task(suite.generate(request, first_token=first))
    try:
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await task
        await suite.until_all_free(1)


async def rest_of(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def waits_for(suite: Suite, holder: asyncio.Task[Outcome], seconds: float) -> bool:
    """Let a sequence wait for blocks so long; return whether it did before the request that holds them ended."""
    async with asyncio.timeout(PATIENCE):
        while not any(pool.waiting for pool in await suite.pools()):
            if holder.done():
                return False
            await asyncio.sleep(0.01)
    await asyncio.wait([holder], timeout=seconds)
    return not holder.done()


async def until_paced(suite: Suite) -> None:
    """Wait until the router has learnt how fast the worker computes prompts."""
    await until(
        suite.status,
        lambda status: all(each.prefill_tokens_per_second for each in status.workers),
        seconds=PATIENCE,
    )


async def seconds_of(suite: Suite, request: pb.GenerateRequest) -> float:
    """Return how long a request takes now."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await suite.generate(request)
    return clock() - began


async def until_waiting(suite: Suite, sequences: int) -> None:
    """Wait until the manager lets so many sequences wait for blocks."""
    await until(suite.pools, lambda pools: sum(pool.waiting for pool in pools) == sequences, seconds=PATIENCE)


async def until_running(suite: Suite) -> None:
    """Wait until the one request that is left has blocks again after a preemption, or has ended."""
    async with asyncio.timeout(PATIENCE):
        while sum(pool.running for pool in await suite.pools()) != 1:
            if not any(pool.running + pool.waiting for pool in await suite.pools()):
                return
            await asyncio.sleep(0.02)


async def until_queued(suite: Suite, queued: int) -> None:
    """Wait until so many requests wait for a worker."""
    await until(suite.status, lambda status: status.queued_requests == queued, seconds=PATIENCE)


async def until_retained(suite: Suite, blocks: int) -> None:
    """Wait until the manager has the end of a request that retains so many blocks."""
    await until(suite.pools, lambda pools: sum(pool.retained for pool in pools) == blocks, seconds=PATIENCE)


async def until_succeeded(suite: Suite, before: int) -> None:
    """Wait until another manager has taken over from that of an epoch."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):  # sent to the one that is just gone
                if await epoch(suite) > before:
                    return
            await asyncio.sleep(0.05)


async def until_worker_is_idle(suite: Suite) -> None:
    """Wait until the worker runs nothing, whatever the router has still to send."""
    await until(
        suite.pools,
        lambda pools: not any(pool.running + pool.waiting for pool in pools),
        every=0.05,
        seconds=PATIENCE,
    )


async def test_incident_a_prefix_shorter_than_a_block(suite: Suite) -> None:
    head = await head_of(suite, await asked(suite, named(prompt(10))))
    assert "0 of 10 prompt tokens were cached: it is shorter than a block, which has 16 tokens." in head


async def test_incident_the_prefix_is_cached_in_another_cache_domain(suite: Suite) -> None:
    words = ""

    async def computed_again(times: int) -> str:
        nonlocal words
        known = 64 * times
        words = (
            f"its first {known} tokens were sent in another cache domain (of tenant peer 127.0.0.1), and not in its own"
        )
        requests = [named(prompt(known + 6)) for _ in range(2)]
        requests[1].prompt.CopyFrom(requests[0].prompt)
        for salt, request in zip(("north", "south"), requests, strict=True):
            request.cache.salt = salt
            await suite.generate(request)
        return await head_of(suite, requests[1].request_id)

    head = await until_blamed("shared_domain", computed_again)
    assert words in head
    assert "shared_domain" in head


async def test_incident_a_prefix_that_was_evicted(suite: Suite) -> None:
    """Another prompt needs nearly all of the pool, whatever earlier tests have left there."""
    crowd = ""

    async def computed_again(times: int) -> str:
        nonlocal crowd
        tokens = prompt(min(320 * times, 2560))
        await asked(suite, named(tokens))
        crowd = await asked(suite, named(prompt(4060)))
        return await head_of(suite, await asked(suite, named(tokens)))

    head = await until_blamed("quirehitratefell", computed_again)
    assert f"worker-0 had more of it, and evicted that to make room for {crowd}." in head
    assert "quirehitratefell" in head


async def test_incident_a_prefix_that_was_retained_and_evicted_all_the_same(suite: Suite) -> None:
    """Its 20 blocks outlive requests that take nearly the whole pool, and not one that needs all of it."""
    request = named(prompt(320))
    request.cache_retention.CopyFrom(pb.CacheRetention(priority=80, duration=600.0))
    await asked(suite, request)
    await until_retained(suite, 20)
    for others in (3400, 1600, 3400):
        await asked(suite, named(prompt(others)))
    assert [(pool.retained, pool.retained_evictions) for pool in await suite.pools()] == [(20, 0)]
    crowd = await asked(suite, named(prompt(4060)))
    head = await head_of(suite, await asked(suite, named(list(request.prompt.token_ids.ids))))
    words = f"evicted that to make room for {crowd} (no block without retention was left)."
    assert f"worker-0 had more of it, and {words}" in head
    assert [pool.retained for pool in await suite.pools()] < [20]


async def test_incident_blocks_that_another_request_holds_and_a_managers_lost_record(suite: Suite) -> None:
    """The wait takes three times as long as the work. The second half is one of two whose answer is "not known"."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await asked(suite, named(prompt(960)))
    held = 3 * (clock() - began)
    ids: list[str] = []

    async def waits_for_blocks(_: int) -> str:
        while True:  # on a busy machine the holder may end too early
            holder, waits = named(prompt(3200), 880), named(prompt(960))
            async with streaming(suite, holder) as task:
                waiting = asyncio.create_task(suite.generate(waits))
                has_waited = await waits_for(suite, task, held)
                task.cancel()
                await waiting
            if has_waited:
                ids[:] = holder.request_id, waits.request_id
                return await head_of(suite, waits.request_id)

    words = "to the first token: it waited at worker-0 for 60 blocks, and 1 sequence of tenant peer 127.0.0.1"
    head = await until_blamed(words, waits_for_blocks)
    holder, waits = ids
    assert words in head
    assert f"held them (the most: {holder})" in head
    before = await epoch(suite)
    kill(suite, "kvmanager")
    await until_succeeded(suite, before)
    await suite.until_all_free(1)
    head = await head_of(suite, waits)
    assert head.startswith("Not known for ")
    assert "it waited at worker-0 to be admitted, and the KV manager's records of that are gone" in head


async def test_incident_a_request_that_still_runs_is_not_known(suite: Suite) -> None:
    runs = named(prompt(20), 3000)
    async with streaming(suite, runs):
        head = await head_of(suite, runs.request_id)
    assert head.startswith("Not known: the request has not ended yet, or the record of its end is gone")


async def test_incident_the_queue_is_full(suite: Suite) -> None:
    calls = []
    try:
        for _ in range(PLACES):
            runs = named(prompt(20), 3000)
            calls.append(suite.inference.Generate(runs, timeout=PATIENCE))
            await until_placed(suite, runs)
        for number in range(QUEUE):
            calls.append(suite.inference.Generate(named(prompt(20)), timeout=PATIENCE))
            await until_queued(suite, number + 1)
        refused = named(prompt(20))
        with pytest.raises(grpc.aio.AioRpcError):
            await suite.generate(refused)
    finally:
        for call in calls:
            call.cancel()
    head = await head_of(suite, refused.request_id)
    assert head.startswith("Refused at once by the limit router.queue: 2 requests wait; at most 2.")
    assert "What to do: Add workers, or raise the limit that refused the request if its clients can wait." in head
    await suite.until_all_free(1)


async def test_incident_a_prompt_that_is_too_long(suite: Suite) -> None:
    long = named(prompt(5000))
    with pytest.raises(grpc.aio.AioRpcError):
        await suite.generate(long)
    head = await head_of(suite, long.request_id)
    assert head.startswith("Refused at once, because it does not fit the context of the model: prompt: This model's")
    assert "However, the prompt has 5000 tokens" in head
    assert "#too-large" in head


async def test_incident_a_hopeless_deadline(suite: Suite) -> None:
    """Seven prompts are before it, each of 1.6 s; none begins before it was refused."""
    await asked(suite, named(prompt(1600)))
    await until_paced(suite)
    calls = []
    async with manager_stopped(suite):
        for _ in range(PLACES - 1):
            ahead = named(prompt(3900))
            calls.append(suite.inference.Generate(ahead, timeout=PATIENCE))
            await until_placed(suite, ahead)
        hopeless = named(prompt(3900))
        with pytest.raises(grpc.aio.AioRpcError):
            await suite.generate(hopeless, timeout=10.0)
        for call in calls:
            call.cancel()
    await suite.until_all_free(1)
    head = await head_of(suite, hopeless.request_id)
    assert head.startswith("Refused, because its deadline was hopeless, after ")
    assert "s are left, and the first token is predicted in" in head


async def test_incident_preempted_by_a_higher_priority(suite: Suite) -> None:
    for output in itertools.chain((60, 120, 240), itertools.repeat(480)):
        victim, urgent = named(prompt(3000), output), named(prompt(2000), 400)
        victim.priority = -5
        async with streaming(suite, victim) as task:
            await suite.generate(urgent)
            outcome = await task
        assert outcome.finished is not None
        if outcome.finished.usage.preemptions:
            break  # otherwise it had ended before the other one came
    head = await head_of(suite, victim.request_id)
    assert re.search(rf"it was preempted: its \d+ blocks went to {urgent.request_id} \(a higher priority waits\)", head)
    assert "quirepreempting" in head
    gained = (await quire_why(suite, urgent.request_id))[1]
    assert re.search(rf"{victim.request_id} gave \d+ blocks \(a higher priority waits\)", gained)


async def test_incident_the_costliest_of_several_preemptions(suite: Suite) -> None:
    """The second one takes eight times as long as the first one."""
    for output in itertools.chain((200, 400), itertools.repeat(800)):
        victim, short, long = named(prompt(2800), output), named(prompt(2000), 50), named(prompt(2000), 400)
        victim.priority = -5
        async with streaming(suite, victim) as task:
            await suite.generate(short)
            await until_running(suite)
            await suite.generate(long)
            outcome = await task
        assert outcome.finished is not None
        if outcome.finished.usage.preemptions == 2:
            break  # otherwise it had ended before one of the others came
    head = await head_of(suite, victim.request_id)
    costliest = rf"what cost most, [\d.]+ m?s, was that its \d+ blocks went to {long.request_id} \(a higher priority"
    assert re.search(rf"it was preempted 2 times; {costliest}", head)


async def test_incident_a_low_priority_that_others_pass_at_the_manager(suite: Suite) -> None:
    """All wait for the blocks of one request, for five times as long as the work takes."""
    held = await seconds_of(suite, named(prompt(960)))

    async def waits_for_others(_: int) -> str:
        while True:  # on a busy machine the holder may end too early
            holder, low = named(prompt(3200), 880), named(prompt(960))
            low.priority = -5
            async with streaming(suite, holder) as task:
                waiting = [asyncio.create_task(suite.generate(low))]
                has_waited = await waits_for(suite, task, 0.0)
                for number in range(2, 4):
                    waiting.append(asyncio.create_task(suite.generate(named(prompt(960)))))
                    await until_waiting(suite, number)
                await asyncio.wait([task], timeout=5 * held)
                has_waited = has_waited and not task.done()
                task.cancel()
                await asyncio.gather(*waiting)
            if has_waited:
                return await head_of(suite, low.request_id)

    words = "to the first token: 2 sequences of a higher priority went first at worker-0: it waited at worker-0 "
    head = await until_blamed(words, waits_for_others)
    assert words in head
    assert "#higher-priority" in head


async def test_incident_a_low_priority_that_others_pass_at_the_router(suite: Suite) -> None:
    """Two wait for a worker; one of those that run leaves for each. Other waits take longer than the work."""
    held = 3 * await seconds_of(suite, named(prompt(20)))

    async def waits_for_a_worker(times: int) -> str:
        calls, low, high = [], named(prompt(20)), named(prompt(20), 3000)
        low.priority = -5
        try:
            for _ in range(PLACES):
                runs = named(prompt(20), 3000)
                calls.append(suite.inference.Generate(runs, timeout=PATIENCE))
                await until_placed(suite, runs)
            waiting = asyncio.create_task(suite.generate(low))
            await until_queued(suite, 1)
            calls.append(suite.inference.Generate(high, timeout=PATIENCE))
            await until_queued(suite, 2)
            await asyncio.wait([waiting], timeout=times * held)
            calls[0].cancel()
            await until_placed(suite, high)
            for call in calls:
                call.cancel()
            await waiting
        finally:
            for call in calls:
                call.cancel()
        return await head_of(suite, low.request_id)

    words = ": 1 request of a higher priority went first while it waited for a worker: no worker could take it"
    head = await until_blamed(words, waits_for_a_worker)
    assert words in head
    assert "#higher-priority" in head
    await suite.until_all_free(1)


async def test_incident_a_begun_prompt_that_lacks_blocks(suite: Suite) -> None:
    """It begins with three quarters of its blocks, and waits for the others until the request that has them ends."""
    while True:  # on a busy machine the other one may end too early, and of two equal waits neither is the cause
        holder, huge = named(prompt(1100), 520), named(prompt(3400))
        async with streaming(suite, holder):
            await suite.generate(huge)
        found = await outcome_of(suite, huge)
        if found.get("before.stalled", 0.0) > 1.2 * found["before.prefill"]:
            break
    head = await head_of(suite, huge.request_id)
    assert re.search(r"it began with a part of its prompt's blocks, and waited at worker-0 for the other \d+", head)
    assert "quireblocksshort" in head


async def test_incident_a_manager_that_stands_still(suite: Suite) -> None:
    """For 5 s a stream has no block for its next tokens, and a request waits for its grant."""
    runs, waits = named(prompt(20), 240), named(prompt(100))
    async with streaming(suite, runs) as task:
        async with manager_stopped(suite):
            waiting = asyncio.create_task(suite.generate(waits))
            await until_placed(suite, waits)
            await asyncio.wait([task, waiting], timeout=5.0)
        await asyncio.gather(task, waiting)
    for request in (runs, waits):
        head = await head_of(suite, request.request_id)
        assert "it lacked blocks at worker-0, whose KV manager did not answer for " in head, head
        assert "quiremanagerdown" in head


async def test_incident_a_client_that_leaves_while_the_manager_stands_still(suite: Suite) -> None:
    """The worker has not said yet why it puts out nothing, and no step of it is blamed."""
    gone = named(prompt(20), 400)
    async with streaming(suite, gone) as task, manager_stopped(suite):
        await asyncio.wait([task], timeout=4.0)
        task.cancel()
        await until(suite.status, lambda status: not status.running_requests, seconds=PATIENCE)
    head = await head_of(suite, gone.request_id)
    assert head.startswith("Its client went away after ")
    assert "worker-0 put out nothing for so long, until the end, and had not said why yet." in head


async def test_incident_a_manager_that_was_killed(suite: Suite) -> None:
    """The next manager needs longer to come than the worker for its work, and the stream has no blocks until then."""
    while True:  # a manager may come too soon
        runs, waits, before = named(prompt(20), 200), named(prompt(100)), await epoch(suite)
        async with streaming(suite, runs) as task:
            kill(suite, "kvmanager")
            waiting = asyncio.create_task(suite.generate(waits))
            await asyncio.gather(task, waiting)
        await until_succeeded(suite, before)
        found = [await outcome_of(suite, each) for each in (runs, waits)]
        if found[0].get("after.manager_away", 0.0) > 0.5 * found[0]["after.decode"]:
            break
    for request in (runs, waits):
        head = await head_of(suite, request.request_id)
        assert "it lacked blocks at worker-0, whose KV manager did not answer for " in head, head
        assert "quiremanagerdown" in head


async def test_incident_a_request_that_only_decoded_slowly(suite: Suite) -> None:
    """The worker computes a prompt in the steps of its tokens, for ten times as long as it samples otherwise."""
    for _ in range(8):
        await asked(suite, named(prompt(20), 40))

    async def beside_a_prompt(_: int) -> str:
        slow = named(prompt(20), 40)
        async with streaming(suite, slow) as task:
            await suite.generate(named(prompt(3600)))
            await task
        return await head_of(suite, slow.request_id)

    head = await until_blamed("worker-0 sampled 39 further tokens slowly", beside_a_prompt)
    assert re.search(
        r"worker-0 sampled 39 further tokens slowly, [\d.]+ m?s from one to the next, where [\d.]+ m?s is usual there "
        r"\(longest inter-token latency: [\d.]+ m?s\)\.",
        head,
    )
    assert "quireslowtokens" in head


async def test_incident_tokens_that_are_shared_beyond_whole_blocks(suite: Suite) -> None:
    shared = prompt(31)
    await asked(suite, named([*shared, 90, *prompt(40)]))
    head = await head_of(suite, await asked(suite, named([*shared, 91, *prompt(40)])))
    count = "of the 31 tokens that it shares with an earlier prompt 16 count, because only whole blocks of 16 do."
    same = "worker-0 has seen no prompt that is the same from token 31 on"
    assert f"16 of 72 prompt tokens were cached: {same}, and {count}" in head
    again = await head_of(suite, await asked(suite, named(shared)))
    assert f"16 of 31 prompt tokens were cached: {count}" in again


async def test_incident_head_of_line_blocked_by_a_huge_prompt(suite: Suite) -> None:
    ahead = 0.0
    while ahead < 2000:  # on a busy machine the small one may come when most of the huge one is computed
        huge, small = named(prompt(3900), 2), named(prompt(40))
        call = suite.inference.Generate(huge, timeout=PATIENCE)
        await call.read()  # it is admitted; its prefill takes 1.6 s
        await suite.generate(small)
        await rest_of(call)
        ahead = (await outcome_of(suite, small)).get("ahead_tokens", 0.0)
    head = await head_of(suite, small.request_id)
    assert "it had its blocks, and worker-0 computed " in head
    assert f"tokens of other requests first, most of them for {huge.request_id}." in head


async def test_incident_a_slow_client(suite: Suite) -> None:
    """The client takes twice as long as the worker, whatever the worker's pace is."""
    request, clock = named(prompt(20), 400), asyncio.get_running_loop().time
    request.sampling.n, request.sampling.logprobs = 4, 20
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    async with grpc.aio.insecure_channel(suite.stack.address, options=narrow) as channel:
        began = clock()
        call = rpc.InferenceServiceStub(channel).Generate(request, timeout=PATIENCE)
        await call.read()
        await until_worker_is_idle(suite)  # the client reads nothing meanwhile
        worked = clock() - began
        while clock() - began < 3 * worked:
            assert (await suite.status()).running_requests == 1
            await asyncio.sleep(0.05)
        await rest_of(call)
    head = await head_of(suite, request.request_id)
    assert re.search(r"^\d+ % of its [\d.]+ s: the client left output unread, for [\d.]+ s at a time\.", head)
    assert "#slow-client" in head


# ------------------------------------------------------------ the command


async def test_requests_are_chosen_by_what_happened_to_them(suite: Suite) -> None:
    mine = await asked(suite, named(prompt(10)))
    status, out, _ = await quire_why(suite, "--last")
    assert (status, f"request {mine}" in out) == (0, True)
    status, out, _ = await quire_why(suite, "--misses", "--since", "1h", "--json")
    assert status == 0
    assert f'"request_id": "{mine}"' in out
    status, out, _ = await quire_why(suite, "--slowest", "2")
    assert (status, len([line for line in out.splitlines() if line.startswith("incident-")])) == (0, 2)


async def test_the_link_of_the_advice_leads_to_its_section_of_the_runbook(suite: Suite) -> None:
    """Whatever the cause is: on a busy machine it may be another one than the short prompt."""
    mine = await asked(suite, named(prompt(10)))
    _, out, _ = await quire_why(suite, mine)
    links = re.findall(r"http://\S+", out)
    assert 1 <= len(links) <= 2, "two, where it is not known which of two causes counts more"
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        for link in links:
            _, _, anchor = link.partition("#")
            page = await client.get(link)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert anchor
            assert f'<h3 id="{anchor}">' in page.text


async def test_an_export_has_everything_in_one_file(suite: Suite, tmp_path: Path) -> None:
    mine = await asked(suite, named(prompt(10)))
    status, _, err = await quire_why(suite, mine, "--export", str(tmp_path / "ticket.json"))
    assert (status, err) == (0, "")
    text = (tmp_path / "ticket.json").read_text()
    assert all(word in text for word in (mine, '"screen"', '"outcome"', '"grant"', '"diagnosis"'))
    status, _, err = await quire_why(suite, mine, "--export", str(tmp_path / "missing" / "ticket.json"))
    assert (status, "cannot be written: No such file or directory; name a file in a folder" in err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "words", "ends"),
    [
        (("unknown-id",), "no record of request unknown-id: no router here has served it", 1),
        ((), "REQUEST: is missing; name a request, or choose with --last", 2),
        (("r", "--last"), "REQUEST: is given with flags that choose requests; give one of both", 2),
        (("--last", "--since", "soon"), "--since: is 'soon'; expected a span of time such as 30s, 5m, 2h or 1d", 2),
        (("--last", "--tenant", "nobody"), "no request has ended here yet, or their records are gone", 1),
    ],
)
async def test_bad_input_is_said_in_one_line_with_what_to_do(
    suite: Suite, flags: tuple[str, ...], words: str, ends: int
) -> None:
    status, out, err = await quire_why(suite, *flags)
    assert (status, out, err.count("\n")) == (ends, "", 1)
    assert words in err

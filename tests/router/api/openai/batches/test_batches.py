"""Files and batches with the official client, over a frontend that plays scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from common.batch.results import Result, ResultFile
from common.contracts import limits
from common.contracts.errors import Overloaded, QuotaViolation, Unavailable
from common.process.supervised import cancel_and_wait
from router.api.openai.batches.folder import BatchFolder
from router.api.openai.batches.runner import BatchParts, BatchRunner
from router.api.openai.batches.uploads import Uploads
from router.contracts.events import ValidatedRequest
from router.tenants.tenancy import Caller, Tenant, TenantLimits
from tests.support.router.fake_frontend import admitted, embedded, finished, tokens
from tests.support.router.http_harness import Api, served_api
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TwoTenants:
    """An Authenticator: the key is the name of the tenant. A name in `gone` is not accepted any more."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.limits = TenantLimits()

    def caller(self, authorization: str, host: str) -> Caller:
        return Caller(Tenant(authorization.removeprefix("Bearer "), limits=self.limits), "key")

    def known(self, tenant: str, credential: str) -> Caller | None:
        assert credential == "key"
        return None if tenant in self.gone else Caller(Tenant(tenant, limits=self.limits), credential)

    def is_live(self, caller: Caller) -> bool:
        return caller.tenant.name not in self.gone


class Served:
    """An API with a folder; `now` is its wall clock. `client` is of the tenant red, `other` of blue."""

    def __init__(self, folder: Path) -> None:
        self.path, self.now = folder, 1_700_000_000.0
        self.tenants = TwoTenants()
        self.folder = BatchFolder(folder)
        self.runner = BatchRunner(self.folder, self.tenants.known, lambda: self.now, at_once=4)
        self.parts = BatchParts(self.folder, Uploads(self.folder, lambda: self.now), self.runner, lambda: self.now)
        self.api: Api
        self.client: openai.AsyncOpenAI
        self.other: openai.AsyncOpenAI
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self.runner.run(self.api.app))

    async def stop(self) -> None:
        """End the runner, as a router does that stops."""
        if self._running is not None:
            await cancel_and_wait(self._running)

    async def upload(self, *lines: dict[str, Any], client: openai.AsyncOpenAI | None = None) -> str:
        content = "".join(json.dumps(each) + "\n" for each in lines).encode()
        self.now += 0.01
        return (await (client or self.client).files.create(file=("in.jsonl", content), purpose="batch")).id

    async def begin(self, *lines: dict[str, Any], endpoint: Any = "/v1/completions", window: Any = "24h") -> Batch:
        file = await self.upload(*lines)
        return await self.client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window)

    async def ended(self, batch: Batch) -> Batch:
        over = ("completed", "failed", "expired", "cancelled")
        return await until(lambda: self.client.batches.retrieve(batch.id), lambda found: found.status in over)

    async def lines(self, file: str | None) -> dict[str, Any]:
        assert file is not None
        found = [json.loads(line) for line in (await self.client.files.content(file)).text.splitlines()]
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found), "each request has one line"
        return by_id

    def files(self) -> list[str]:
        """Return the names of all files on disk."""
        return sorted(path.name for path in self.path.rglob("*") if path.is_file())


@asynccontextmanager
async def served_batches(folder: Path) -> AsyncIterator[Served]:
    served = Served(folder)
    async with served_api(authenticator=served.tenants, batches=served.parts) as api:
        served.api = api
        made = [openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0) for key in ("red", "blue")]
        served.client, served.other = made
        served.start()
        yield served
        await served.stop()
        for client in made:
            await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_batches(tmp_path_factory.mktemp("batches")) as running:
        yield running


@pytest.fixture
def served(module_served: Served) -> Served:
    module_served.api.reset()
    return module_served


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"} | body}


async def test_a_batch_is_answered_and_its_files_are_read(served: Served) -> None:
    lines = [completion("a", max_tokens=3), completion("é"), completion("bad", temperature=-1)]
    file = await served.upload(*lines)
    batch = await served.client.batches.create(
        input_file_id=file, endpoint="/v1/completions", completion_window="24h", metadata={"for": "test"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "test"})
    assert batch.expires_at == batch.created_at + 86_400
    ended = await served.ended(batch)
    assert (ended.status, ended.errors, ended.input_file_id) == ("completed", None, file)
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    good, bad = await served.lines(ended.output_file_id), await served.lines(ended.error_file_id)
    assert set(good) == {"a", "é"}
    answer = good["a"]["response"]
    assert (answer["status_code"], good["a"]["error"]) == (200, None)
    assert answer["body"]["choices"][0]["text"] == "Hello world"
    assert (bad["bad"]["response"]["status_code"], bad["bad"]["error"]) == (400, None)
    assert bad["bad"]["response"]["body"]["error"]["param"] == "temperature"
    described = await served.client.files.retrieve(ended.output_file_id or "")
    assert (described.purpose, described.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert described.bytes == len((await served.client.files.content(described.id)).content)


async def test_lines_run_as_requests_of_the_tenant_below_all_others(served: Served) -> None:
    await served.ended(await served.begin(completion("a", priority=5, user="u")))
    (request,) = served.api.frontend.requests
    assert (request.caller.tenant.name, request.caller.credential, request.priority) == ("red", "key", -100)
    assert request.whole


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
async def test_every_kind_of_request_is_answered(served: Served, url: str, body: dict[str, Any]) -> None:
    batch = await served.begin({"custom_id": "a", "method": "POST", "url": url, "body": body}, endpoint=url)
    found = await served.lines((await served.ended(batch)).output_file_id)
    kinds = {"/v1/chat/completions": "chat.completion", "/v1/responses": "response", "/v1/embeddings": "list"}
    assert found["a"]["response"]["body"]["object"] == kinds[url]
    assert {request.priority for request in served.api.frontend.requests} == {-100}


async def test_few_requests_run_at_once(served: Served) -> None:
    gate = asyncio.Event()
    served.api.frontend.script = lambda request: [admitted(request), gate, tokens("a"), finished(1)]
    batch = await served.begin(*[completion(f"n{number}") for number in range(9)])
    await until(lambda: len(served.api.frontend.requests) == 4)
    counted = await served.client.batches.retrieve(batch.id)
    assert (counted.status, len(served.api.frontend.requests)) == ("in_progress", 4)
    gate.set()
    ended = await served.ended(batch)
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 9


async def test_a_tenant_with_few_streams_keeps_half_of_them(served: Served) -> None:
    served.tenants.limits = TenantLimits(streams=4)
    gate = asyncio.Event()
    served.api.frontend.script = lambda request: [admitted(request), gate, tokens("a"), finished(1)]
    try:
        batch = await served.begin(*[completion(f"n{number}") for number in range(5)])
        await until(lambda: len(served.api.frontend.requests) == 2)
        assert (await served.client.batches.retrieve(batch.id)).status == "in_progress"
        assert len(served.api.frontend.requests) == 2
        gate.set()
        assert (await served.ended(batch)).status == "completed"
    finally:
        served.tenants.limits = TenantLimits()


async def test_a_busy_router_is_asked_again(served: Served) -> None:
    refusals = [Overloaded(QuotaViolation("router.queue", "full"), 0.1)] * 3

    def script(request: ValidatedRequest) -> list[Any]:
        return [refusals.pop()] if refusals else [admitted(request), tokens("a"), finished(1)]

    served.api.frontend.script = script
    ended = await served.ended(await served.begin(completion("a"), completion("b")))
    assert ended.request_counts is not None
    assert (refusals, ended.request_counts.completed, ended.error_file_id) == ([], 2, None)


async def test_a_cancelled_batch_keeps_what_was_answered_and_accounts_for_the_rest(served: Served) -> None:
    def script(request: ValidatedRequest) -> list[Any]:
        wait = [] if request.sampling.max_tokens == 1 else [asyncio.Event()]
        return [admitted(request), *wait, tokens("a"), finished(1)]

    served.api.frontend.script = script
    batch = await served.begin(completion("a", max_tokens=1), *[completion(f"n{number}") for number in range(6)])
    await until(lambda: served.api.frontend.ended == 1 and len(served.api.frontend.requests) == 5)
    asked = await served.client.batches.cancel(batch.id)
    assert asked.status in ("cancelling", "cancelled")
    ended = await served.ended(batch)
    assert (ended.status, served.api.frontend.ended) == ("cancelled", 5)
    assert None not in (ended.cancelling_at, ended.cancelled_at)
    assert set(await served.lines(ended.output_file_id)) == {"a"}
    left = await served.lines(ended.error_file_id)
    assert {each["error"]["code"] for each in left.values()} == {"batch_cancelled"}
    assert len(left) == 6
    assert (await served.client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_waits_behind_another_ends_when_its_client_or_its_time_says_so(served: Served) -> None:
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    first = await served.begin(completion("a"))
    await until(lambda: len(served.api.frontend.requests) == 1)
    unwanted, late = await served.begin(completion("b")), await served.begin(completion("c"), window="1h")
    await served.client.batches.cancel(unwanted.id)
    assert (await served.ended(unwanted)).status == "cancelled"
    served.now += 3600
    served.runner.wake()
    try:
        ended = await served.ended(late)
        assert (ended.status, set(await served.lines(ended.error_file_id))) == ("expired", {"c"})
        assert (await served.client.batches.retrieve(first.id)).status == "in_progress"
        assert len(served.api.frontend.requests) == 1, "nothing of the others was sent"
    finally:
        served.now -= 3600
        await served.client.batches.cancel(first.id)
        await served.ended(first)


async def test_what_is_not_done_in_time_expires(served: Served) -> None:
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batch = await served.begin(completion("a"), window="1h")
    await until(lambda: len(served.api.frontend.requests) == 1)
    served.now += 3600
    try:
        ended = await served.ended(batch)
        assert (ended.status, ended.output_file_id) == ("expired", None)
        assert (await served.lines(ended.error_file_id))["a"]["error"]["code"] == "batch_expired"
    finally:
        served.now -= 3600


async def test_a_key_that_is_revoked_ends_its_batch(served: Served) -> None:
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batch = await served.begin(completion("a"))
    await until(lambda: len(served.api.frontend.requests) == 1)
    served.tenants.gone.add("red")
    try:
        ended = await served.ended(batch)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].code == "key_revoked"
    finally:
        served.tenants.gone.clear()


async def test_a_router_that_comes_back_goes_on_where_it_was(served: Served) -> None:
    held = asyncio.Event()

    def script(request: ValidatedRequest) -> list[Any]:
        wait = [held] if request.sampling.max_tokens == 2 else []
        return [admitted(request), *wait, tokens("a"), finished(1)]

    served.api.frontend.script = script
    lines = [completion(f"n{number}", max_tokens=1 + (number == 5)) for number in range(8)]
    batch = await served.begin(*lines)
    await until(lambda: served.api.frontend.ended == 7)
    assert (await served.client.files.delete(batch.input_file_id)).deleted, "the batch has its input"
    await served.stop()
    stopped = await served.client.batches.retrieve(batch.id)
    assert stopped.status == "in_progress"
    asked = len(served.api.frontend.requests)
    held.set()
    served.start()
    ended = await served.ended(batch)
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 8, "completed": 8, "failed": 0}
    assert len(await served.lines(ended.output_file_id)) == 8
    assert len(served.api.frontend.requests) == asked + 1, "the line in flight alone is sent again"
    assert not [name for name in served.files() if name.endswith((".open", ".in", ".part"))]


async def test_what_another_router_wishes_is_done(served: Served) -> None:
    """It writes its wish into the folder, and nothing wakes this one."""
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batch = await served.begin(completion("a"))
    await until(lambda: len(served.api.frontend.requests) == 1)
    served.folder.wish_to_cancel("red", batch.id)
    assert (await served.client.batches.retrieve(batch.id)).status == "cancelling"
    assert (await served.ended(batch)).status == "cancelled"


async def test_another_tenant_finds_nothing(served: Served) -> None:
    other = served.other.with_options(api_key="finder")
    batch = await served.ended(await served.begin(completion("a")))
    for call in (
        other.files.retrieve(batch.input_file_id),
        other.files.content(batch.output_file_id or ""),
        other.files.delete(batch.input_file_id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError, match="is not here"):
            await call
    assert [each async for each in other.files.list()] == []
    assert [each async for each in other.batches.list()] == []
    assert (await served.client.files.retrieve(batch.input_file_id)).filename == "in.jsonl"


async def test_lists_come_in_pages(served: Served) -> None:
    lists = served.other.with_options(api_key="pages")
    made = [await served.upload(completion("a"), client=lists) for _ in range(3)]
    found = [each.id async for each in lists.files.list(limit=2)]
    assert found == made[::-1]
    assert [each.id async for each in lists.files.list(order="asc", limit=1)] == made
    assert [each async for each in lists.files.list(purpose="batch_output")] == []
    batches = []
    for file in made:
        served.now += 0.01
        batches.append(
            await lists.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        )
    assert [each.id async for each in lists.batches.list(limit=2)] == [each.id for each in batches][::-1]
    with pytest.raises(openai.BadRequestError, match="after: is 'none'"):
        await lists.batches.list(after="none")


async def test_a_deleted_file_is_gone(served: Served) -> None:
    file = await served.upload(completion("a"))
    assert (await served.client.files.delete(file)).model_dump() == {"id": file, "object": "file", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await served.client.files.retrieve(file)
    assert not [name for name in served.files() if file in name]


async def test_a_file_is_kept_as_long_as_its_client_says(served: Served) -> None:
    content = json.dumps(completion("a")).encode()
    file = await served.client.files.create(
        file=("in.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    served.now += 3600
    try:
        with pytest.raises(openai.NotFoundError):
            await served.client.files.retrieve(file.id)
        served.folder.sweep(served.now)
        assert not [name for name in served.files() if file.id in name]
    finally:
        served.now -= 3600


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint", "the file has lines for /v1/completions"),
        ({"endpoint": "/v1/models"}, "endpoint", "expected one of /v1/chat/completions"),
        ({"completion_window": "8d"}, "completion_window", "expected 24h, or another span up to 7d"),
        ({"completion_window": "0h"}, "completion_window", "expected 24h"),
        ({"completion_window": "soon"}, "completion_window", "is 'soon'"),
        ({"metadata": {f"k{number}": "v" for number in range(17)}}, "metadata", "at most 16"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds", "3600"),
    ],
)
async def test_a_wrong_batch_is_refused_by_name(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    file = await served.upload(completion("a"))
    asked: Any = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    with pytest.raises(openai.BadRequestError) as refused:
        await served.client.batches.create(**asked)
    assert (refused.value.param, words in refused.value.message) == (param, True), refused.value


@pytest.mark.parametrize("name", ["none", "file-1", "..%2F..%2Fetc", "file-" + "0" * 31, f"file-{'g' * 32}"])
async def test_ids_that_are_none_are_not_found(served: Served, name: str) -> None:
    answer = await served.api.http.get(f"/v1/files/{name}")
    assert answer.status_code == 404


async def test_answers_are_no_input(served: Served) -> None:
    batch = await served.ended(await served.begin(completion("a")))
    with pytest.raises(openai.BadRequestError, match="has the purpose batch_output; expected"):
        await served.client.batches.create(
            input_file_id=batch.output_file_id or "", endpoint="/v1/completions", completion_window="24h"
        )


@pytest.mark.parametrize(
    ("file", "purpose", "param", "words"),
    [
        (("in.jsonl", b"no json"), "batch", "line 1", "is not valid JSON"),
        (("in.jsonl", b""), "batch", "file", "has no lines"),
        (("in.jsonl", json.dumps(completion("a")).encode()), "fine-tune", "purpose", "expected batch"),
        (("../in.jsonl", json.dumps(completion("a")).encode()), "batch", "file", "and no path"),
        (("in.jsonl", b"\n".join([json.dumps(completion("a")).encode()] * 2)), "batch", "line 2", "line 1 too"),
    ],
)
async def test_a_wrong_upload_is_refused_by_name_and_leaves_nothing(
    served: Served, file: Any, purpose: Any, param: str, words: str
) -> None:
    before = served.files()
    with pytest.raises(openai.BadRequestError) as refused:
        await served.client.files.create(file=file, purpose=purpose)
    assert (refused.value.param, words in refused.value.message) == (param, True), refused.value
    assert served.files() == before


@pytest.mark.parametrize(
    ("headers", "content", "status", "words"),
    [
        ({"content-type": "application/json"}, b"{}", 400, "expected multipart/form-data with a boundary"),
        ({"content-type": "multipart/form-data; boundary=b"}, b"--b\r\n", 400, "ends before its last boundary"),
        ({"content-type": "multipart/form-data; boundary=b"}, b"--b--", 400, "purpose: is missing"),
        ({"content-type": "multipart/form-data; boundary=b", "content-encoding": "gzip"}, b"", 415, "expected none"),
    ],
)
async def test_what_is_no_form_is_refused(
    served: Served, headers: dict[str, str], content: bytes, status: int, words: str
) -> None:
    answer = await served.api.http.post("/v1/files", content=content, headers=headers)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


async def test_files_have_bounds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps(completion("a")).encode()
    await served.upload(completion("a"))
    monkeypatch.setattr(limits, "MAX_BATCH_FILE_BYTES", len(content) - 1)
    with pytest.raises(openai.APIStatusError) as large:
        await served.client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
    monkeypatch.undo()
    for limit in ("MAX_BATCH_FILES_A_TENANT", "MAX_BATCH_BYTES_A_TENANT"):
        monkeypatch.setattr(limits, limit, 1)
        with pytest.raises(openai.BadRequestError) as full:
            await served.upload(completion("a"))
        assert (full.value.code, full.value.param) == ("storage_full", "file")
        monkeypatch.undo()
    monkeypatch.setattr(limits, "MIN_FREE_BATCH_BYTES", 1 << 60)
    with pytest.raises(openai.InternalServerError, match="almost full") as unavailable:
        await served.upload(completion("a"))
    assert unavailable.value.status_code == 503


async def test_answers_beyond_the_tenants_bytes_end_a_batch(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()

    def script(request: ValidatedRequest) -> list[Any]:
        wait = [held] if request.sampling.max_tokens == 2 else []
        return [admitted(request), *wait, tokens("a" * 4000), finished(1)]

    served.api.frontend.script = script
    batch = await served.begin(completion("a", max_tokens=1), completion("b", max_tokens=2))
    await until(lambda: served.api.frontend.ended == 1)
    monkeypatch.setattr(limits, "MAX_BATCH_BYTES_A_TENANT", 1)
    other = await served.client.batches.retrieve(batch.id)
    assert other.status == "in_progress"
    await served.stop()
    served.start()
    ended = await served.ended(batch)
    assert (ended.status, set(await served.lines(ended.output_file_id))) == ("failed", {"a"})
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert ended.errors.data[0].code == "storage_full"


async def resumed_after_its_pause(served: Served, batch: Batch, caplog: pytest.LogCaptureFixture) -> Batch:
    """Wait until a batch pauses, then until it has ended."""
    await until(lambda: "a batch pauses" in caplog.text)
    assert (await served.client.batches.retrieve(batch.id)).status == "in_progress"
    served.now += 31
    served.runner.wake()
    return await served.ended(batch)


async def test_a_batch_pauses_while_the_disk_is_almost_full(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    served.api.frontend.script = lambda request: [admitted(request), gate, tokens("a"), finished(1)]
    batch = await served.begin(completion("a"), completion("b"))
    await until(lambda: len(served.api.frontend.requests) == 2)
    with monkeypatch.context() as full:
        full.setattr(limits, "MIN_FREE_BATCH_BYTES", 1 << 60)
        await until(lambda: "a batch pauses" in caplog.text)
        assert served.api.frontend.ended == 2, "its requests are cancelled"
    gate.set()
    ended = await resumed_after_its_pause(served, batch, caplog)
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 2


async def test_an_answer_that_finds_no_room_is_asked_for_again(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, failures = ResultFile.write, [Unavailable("No space left on device")]

    def fails_once(self: ResultFile, result: Result) -> int:
        if result.custom_id == "b" and failures:
            with self._path.open("ab") as file:
                file.write(result.line()[:40])  # as much as there was room for
            raise failures.pop()
        return write(self, result)

    monkeypatch.setattr(ResultFile, "write", fails_once)
    batch = await served.begin(completion("a"), completion("b"), completion("c"))
    ended = await resumed_after_its_pause(served, batch, caplog)
    assert (ended.status, set(await served.lines(ended.output_file_id))) == ("completed", {"a", "b", "c"})


@pytest.mark.parametrize("change", ["gone", "changed"])
async def test_an_input_that_somebody_took_away_ends_its_batch(served: Served, change: str) -> None:
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batch = await served.begin(completion("a"))
    await until(lambda: len(served.api.frontend.requests) == 1)
    await served.stop()
    (path,) = served.path.rglob(f"{batch.id}.in")
    path.unlink()
    if change == "changed":
        path.write_bytes(b"no line\n")
    served.start()
    ended = await served.ended(batch)
    assert ended.status == "failed"
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert ended.errors.data[0].code == "invalid_input"


async def test_a_batch_without_its_input_is_cancelled_all_the_same(served: Served) -> None:
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batch = await served.begin(completion("a"))
    await until(lambda: len(served.api.frontend.requests) == 1)
    (path,) = served.path.rglob(f"{batch.id}.in")
    path.unlink()
    await served.client.batches.cancel(batch.id)
    assert (await served.ended(batch)).status == "cancelled"


async def test_batches_that_wait_are_few(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_BATCHES_A_TENANT", 2)
    served.api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    batches = [await served.begin(completion("a")) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 batches have not ended; at most 2"):
        await served.begin(completion("a"))
    for each in batches:
        await served.client.batches.cancel(each.id)
    assert {(await served.ended(each)).status for each in batches} == {"cancelled"}


async def test_uploads_at_once_are_few(served: Served) -> None:
    gate = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await gate.wait()

    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": "Bearer red"}
    async with httpx.AsyncClient(base_url=served.api.url, headers=headers) as http:
        waiting = [
            asyncio.create_task(http.post("/v1/files", content=slow())) for _ in range(limits.MAX_UPLOADS_A_TENANT)
        ]
        await until(lambda: len([name for name in served.files() if name.endswith(".part")]) == len(waiting))
        with pytest.raises(openai.RateLimitError, match="files are being received; at most 2 at once"):
            await served.upload(completion("a"))
        await served.upload(completion("a"), client=served.other)
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {400}
    assert not [name for name in served.files() if name.endswith(".part")]


async def test_a_client_that_goes_away_in_its_upload_leaves_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await until(lambda: [name for name in served.files() if name.endswith(".part")])
        raise ConnectionResetError

    headers = {"content-type": "multipart/form-data; boundary=b"}
    with pytest.raises(ConnectionResetError):
        await served.api.http.post("/v1/files", content=broken(), headers=headers)
    await until(lambda: not [name for name in served.files() if name.endswith(".part")])
    await served.upload(completion("a"))  # what the first one had to say is in the log by then
    assert "Traceback" not in caplog.text


async def test_without_a_folder_the_routes_say_what_to_set() -> None:
    async with served_api() as api:
        for call in (
            api.client.files.list(),
            api.client.files.create(file=("a", b"{}"), purpose="batch"),
            api.client.batches.retrieve("batch_1"),
            api.client.batches.create(input_file_id="f", endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError, match="start the router with --batch-dir DIR") as off:
                await call
            assert off.value.code == "batches_off"


async def test_an_answer_in_numbers_stays_as_it_is(served: Served) -> None:
    served.api.frontend.script = lambda request: [admitted(request), embedded(0.1, 1 / 3)]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}
    batch = await served.ended(await served.begin(line, endpoint="/v1/embeddings"))
    direct = await served.client.post("/embeddings", body={"input": "a"}, cast_to=httpx.Response)
    assert (await served.lines(batch.output_file_id))["a"]["response"]["body"] == direct.json()

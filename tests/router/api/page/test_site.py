"""The page over a real socket: files, headers, who may read, errors, and how many answers are made at once."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

import httpx
import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest, NotFound, Unavailable
from common.process.metrics import MetricsServer, new_registry
from common.process.small_http import Reply, Request
from router.api.page import records, routing
from router.api.page.answers import MOST_KEPT, MOST_WAITING, MOST_WAITING_A_PEER, Source
from router.api.page.blocks import block_asked, map_asked
from router.api.page.query import Query
from router.api.page.requests import most_of, name_of
from router.api.page.site import PREFIX, Site
from router.observe.diagnosis.causes import RUNBOOK
from tests.support.turns import counted_turns
from tests.support.waiting import until


class Data:
    """Sources that a test looks into."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.inside = self.most_inside = 0
        self.clock = ManualClock(100.0)
        self.timers: list[Callable[[], None]] = []

    async def echo(self, query: Query) -> object:
        self.asked.append(query.text("id"))
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await self.hold.wait()
        finally:
            self.inside -= 1
        if query.text("id") == "gone":
            raise NotFound("no record of request gone")
        if query.text("id") == "away":
            raise Unavailable("no KV manager answers")
        return {"id": query.text("id")}

    def site(self, from_elsewhere: bool = True) -> Site:
        check = partial(Query.number, name="number", default=0, most=9)
        sources = {"echo": Source(self.echo, frozenset(("id", "and", "number")), check)}
        return Site(sources, self.clock, from_elsewhere, lambda seconds, call: self.timers.append(call))

    def pass_a_second(self) -> None:
        """Call what waits for a second to pass."""
        timers, self.timers = self.timers, []
        for call in timers:
            call()


@pytest.fixture
def data() -> Data:
    return Data()


@pytest.fixture
async def client(data: Data) -> AsyncIterator[httpx.AsyncClient]:
    server = MetricsServer(new_registry(), lambda: True)
    server.add_site(PREFIX, data.site().answer)
    await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0) as opened:
        yield opened
    await server.stop()


async def test_the_page_and_its_files(client: httpx.AsyncClient) -> None:
    page = await client.get("/page/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Quire</title>" in page.text
    script = await client.get("/page/views/overview.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (await client.get("/page/vendor/uPlot.LICENSE.txt")).text.startswith("The MIT License")


async def test_the_runbook_stands_beside_the_page(client: httpx.AsyncClient) -> None:
    runbook = await client.get(RUNBOOK)
    assert (runbook.status_code, runbook.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert '<h3 id="quireblocksshort">QuireBlocksShort</h3>' in runbook.text
    for name in re.findall(r'(?:href|src)="([^"]+)"', runbook.text):
        assert (await client.get(f"/page/{name}")).status_code == 200


@pytest.mark.parametrize("path", ["/page/", RUNBOOK, "/page/data/echo?id=a", "/page/nothing", "/page/data/nothing"])
async def test_every_answer_forbids_foreign_and_inline_code(client: httpx.AsyncClient, path: str) -> None:
    headers = (await client.get(path)).headers
    policy = headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/", "/page"])
async def test_the_root_leads_to_the_page(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.headers["location"]) == (302, "/page/")


@pytest.mark.parametrize(
    "path", ["/page/../main.py", "/page/%2e%2e/main.py", "/page//etc/passwd", "/page/npm/vendor.py", "/page/views/"]
)
async def test_only_files_of_the_page_are_served(data: Data, path: str) -> None:
    answer = await data.site().answer(Request("GET", path, "", peer="127.0.0.1", host="localhost"))
    assert answer.status == 404


async def test_nothing_of_the_page_changes_anything(client: httpx.AsyncClient) -> None:
    assert (await client.post("/page/data/echo?id=a")).status_code == 405


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("id=gone", 404, "no record of request gone"),
        ("id=away", 503, "no KV manager answers"),
        ("name=a", 400, "name: is unknown here; expected and, id"),
        ("id=%00%ff", 400, "in UTF-8"),
    ],
)
async def test_errors_are_json(client: httpx.AsyncClient, query: str, status: int, words: str) -> None:
    answer = await client.get(f"/page/data/echo?{query}")
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


async def test_what_clients_sent_stays_text(client: httpx.AsyncClient) -> None:
    answer = await client.get("/page/data/echo", params={"id": "<script>alert(1)</script>"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"id": "<script>alert(1)</script>"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:51051", 200),
        ("[::1]:51051", 200),
        ("localhost", 200),
        ("router:51051", 200),
        ("router.quire.svc", 200),
        ("192.0.2.7", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:51051", 403),
        (socket.gethostname().upper(), 200),
        ("page.localhost:51051", 200),
        ("router.quire.svc.cluster.local", 200),
        ("printer.local", 403),
        ("router.corp.internal", 403),
        ("", 403),
    ],
)
async def test_a_name_that_could_lead_elsewhere_is_refused(data: Data, host: str, status: int) -> None:
    request = Request("GET", "/page/data/echo", "", peer="127.0.0.1", query="id=a", host=host)
    assert (await data.site().answer(request)).status == status


@pytest.mark.parametrize(("origin", "status"), [("", 200), ("http://localhost:1", 200), ("https://evil.example", 403)])
async def test_pages_of_other_origins_get_nothing(data: Data, origin: str, status: int) -> None:
    request = Request("GET", "/page/data/echo", "", origin=origin, peer="127.0.0.1", query="id=a", host="localhost:1")
    assert (await data.site().answer(request)).status == status


@pytest.mark.parametrize("fetched", ["cross-site", "same-site", "none", "?"])
async def test_a_browser_gets_data_for_the_page_itself_alone(data: Data, fetched: str) -> None:
    asked = Request("GET", "/page/data/echo", "", peer="127.0.0.1", query="id=a", host="localhost")
    refused = await data.site().answer(asked._replace(fetch_site=fetched))
    assert (refused.status, b"for the page itself" in refused.body, data.asked) == (403, True, [])
    assert (await data.site().answer(asked._replace(fetch_site="same-origin"))).status == 200
    # A link, or an address that somebody types, leads to the page itself.
    assert (await data.site().answer(asked._replace(path="/page/", fetch_site=fetched))).status == 200


async def test_the_server_reads_what_a_browser_says_of_its_fetch(client: httpx.AsyncClient) -> None:
    answer = await client.get("/page/data/echo?id=a", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("peer", "from_elsewhere", "status"), [("10.1.2.3", False, 403), ("10.1.2.3", True, 200), ("127.0.0.1", False, 200)]
)
async def test_with_certificates_only_the_machine_itself_may_read(
    data: Data, peer: str, from_elsewhere: bool, status: int
) -> None:
    request = Request("GET", "/page/data/echo", "", peer=peer, query="id=a", host="192.0.2.7")
    assert (await data.site(from_elsewhere).answer(request)).status == status


def ask(site: Site, query: str, peer: str = "127.0.0.1", name: str = "echo") -> asyncio.Task[Reply]:
    request = Request("GET", f"/page/data/{name}", "", peer=peer, query=query, host="localhost")
    return asyncio.create_task(site.answer(request))


async def until_inside(data: Data, most: int) -> None:
    await until(lambda: data.inside >= most, every=0)


async def test_equal_questions_share_an_answer_for_a_second(data: Data) -> None:
    site = data.site()
    await asyncio.gather(*(ask(site, "id=a&and=b") for _ in range(5)))
    await ask(site, "and=b&id=%61")
    assert data.asked == ["a"]
    data.pass_a_second()
    await ask(site, "and=b&id=a")
    assert data.asked == ["a", "a"]


async def test_answers_are_dropped_after_a_second_though_nobody_asks(data: Data) -> None:
    site = data.site()
    await asyncio.gather(*(ask(site, f"id={number}", f"10.0.0.{number % 8}") for number in range(MOST_WAITING)))
    await ask(site, "id=one more")
    assert site.kept == MOST_KEPT
    data.pass_a_second()
    assert site.kept == 0


async def test_the_loop_turns_between_any_two_answers() -> None:
    async with counted_turns() as turns:
        seen = []

        async def at_once(query: Query) -> object:
            seen.append(turns.count)
            return {}

        site = Site({"echo": Source(at_once, frozenset(("id",)))}, ManualClock(100.0), from_elsewhere=True)
        await asyncio.gather(*(ask(site, f"id={number}", f"10.0.0.{number % 8}") for number in range(64)))
    assert len(set(seen)) == 64


async def test_few_answers_are_made_at_once_and_few_questions_wait(data: Data) -> None:
    site = data.site()
    data.hold.clear()
    peers = MOST_WAITING // MOST_WAITING_A_PEER
    waiting = [ask(site, f"id={number}", f"10.0.0.{number % peers}") for number in range(MOST_WAITING)]
    await until_inside(data, 4)
    refused = await ask(site, "id=one more", "10.0.1.1")
    assert refused.status == 429
    data.hold.set()
    answers = await asyncio.gather(*waiting)
    assert {each.status.value for each in answers} == {200}
    assert (data.most_inside, len(data.asked)) == (4, MOST_WAITING)


async def test_one_address_leaves_places_to_others(data: Data) -> None:
    site = data.site()
    data.hold.clear()
    waiting = [ask(site, f"id={number}", "10.0.0.1") for number in range(MOST_WAITING_A_PEER)]
    await until_inside(data, 4)
    refused = await ask(site, "id=one more", "10.0.0.1")
    assert (refused.status, b"16 of 10.0.0.1 wait" in refused.body) == (429, True)
    # Who asks what is asked already takes no place.
    waiting += [ask(site, "id=3", "10.0.0.1"), ask(site, "id=one more", "10.0.0.2")]
    data.hold.set()
    assert {each.status.value for each in await asyncio.gather(*waiting)} == {200}


async def test_wrong_questions_are_refused_at_once_and_take_no_place(data: Data) -> None:
    site = data.site()
    data.hold.clear()
    waiting = [ask(site, f"id={number}", "10.0.0.1") for number in range(MOST_WAITING_A_PEER)]
    await until_inside(data, 4)
    for number in range(2 * MOST_WAITING):
        assert (await ask(site, f"id={number}", "10.0.0.2", name=f"none{number}")).status == 404
        assert (await ask(site, f"x{number}=1", "10.0.0.2")).status == 400
        assert (await ask(site, f"number=x{number}", "10.0.0.2")).status == 400
    waiting.append(ask(site, "id=right", "10.0.0.2"))
    data.hold.set()
    assert {each.status.value for each in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (records.asked, "limit=x"),
        (records.asked, "kind=x"),
        (records.asked, "page=x"),
        (records.asked, "service=x"),
        (most_of, "limit=201"),
        (name_of, ""),
        (name_of, "id=%20"),
        (routing.asked, "limit=x"),
        (map_asked, "first=x&worker=w"),
        (map_asked, "sequence=x&worker=w"),
        (map_asked, "limit=1"),
        (block_asked, "block=x&worker=w"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__qualname__,
)
def test_wrong_values_are_found_before_a_place_is_taken(check: Callable[[Query], object], wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        check(Query(wrong))


async def test_a_question_that_all_readers_left_is_dropped(data: Data) -> None:
    site = data.site()
    data.hold.clear()
    readers = [ask(site, f"id={number % MOST_WAITING_A_PEER}") for number in range(2 * MOST_WAITING_A_PEER)]
    await until_inside(data, 4)
    for each in readers:
        each.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    # It asks what was asked already: nobody joins a question that is dropped.
    again = ask(site, "id=1", "10.0.0.2")
    await until(lambda: data.asked.count("1") >= 2, every=0)
    data.hold.set()
    assert (await again).status == 200
    assert data.asked == ["0", "1", "2", "3", "1"]


async def test_a_reader_who_leaves_does_not_take_the_answer_from_others(data: Data) -> None:
    site = data.site()
    data.hold.clear()
    first, second = ask(site, "id=a"), ask(site, "id=a")
    await until_inside(data, 1)
    first.cancel()
    data.hold.set()
    assert (await second).status == 200

"""The page for operators on a running suite: its data, and each view in headless Chromium with live figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.checkpoints import checkpoint
from tests.support.page_suite import BLOCKS, WORKERS, answer_of, page_suite
from tests.support.screenshots import READY
from tests.support.simulated import seeded
from tests.support.suite import PATIENCE, Suite, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What a client may call its request: printable, and markup to whoever takes it for that.
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
REQUESTS = {"served-1", HOSTILE, "running-1"}
SHARED = list(range(100, 180))
PAGES = 64
"""Of the pool whose layers are groups."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; on Debian: apt-get install chromium")


class Paged:
    """A suite that has served some requests and runs one, which it began with a prefix of the first."""

    def __init__(self, suite: Suite, url: str) -> None:
        self.suite, self.url = suite, url

    async def data(self, name: str, **parameters: object) -> Any:
        answer = await answer_of(f"{self.url}data/{name}", parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refusal(self, name: str, **parameters: object) -> tuple[int, str]:
        answer = await answer_of(f"{self.url}data/{name}", parameters)
        return answer.status_code, answer.json()["error"]["message"]

    async def routed(self) -> list[Any]:
        """Return all routing records, newest first; a request that was moved has several."""
        found, page = list[Any](), ""
        while True:
            part = await self.data("decisions", kind="routing", limit=1, page=page)
            found += part["records"]
            if not (page := part["page"]):
                return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def paged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Paged]:
    async with page_suite(tmp_path_factory.mktemp("page"), "base=600ms") as (suite, url):
        for name in ("served-1", HOSTILE):
            request = seeded([*SHARED, 200], 3)
            request.request_id = name
            await suite.generate(request)
        await suite.until_all_free(WORKERS)
        # It runs for a quarter of an hour at least, on every machine: the tests see blocks in use.
        first = asyncio.Event()
        running = seeded([*SHARED, 300], 1500)
        running.request_id = "running-1"
        task = asyncio.create_task(suite.generate(running, first_token=first))
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        yield Paged(suite, url)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_recorded(paged: Paged) -> str:
    """Wait until the manager's map shows the running sequence with a shared block; return its worker."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for worker in (each["worker"] for each in (await paged.data("overview"))["workers"]):
                found = await paged.data("blocks", worker=worker)
                if any(each["request"] == "running-1" for each in found["sequences"]):
                    return str(worker)
            await asyncio.sleep(0.05)


async def test_overview_has_what_the_services_say(paged: Paged) -> None:
    worker = await until_recorded(paged)
    async with asyncio.timeout(PATIENCE):
        # Workers say how many sequences run, some time after the router has placed them.
        while True:
            found = await paged.data("overview")
            if found["running"] == 1:
                break
            await asyncio.sleep(0.05)
    assert found["running"] == sum(each["running"] for each in found["workers"])
    assert found["waiting"] == 0
    assert [each["state"] for each in found["workers"]] == ["connected"] * WORKERS
    (busy,) = [each for each in found["workers"] if each["worker"] == worker]
    assert busy["in_use"] + busy["leased"] + busy["cached"] + busy["free"] == busy["blocks"] == BLOCKS
    assert busy["in_use"] > 0
    assert found["hits"]["requests"] == 2
    assert found["hits"]["prompt_tokens"] == 162
    # The second request found the five full blocks of the first, unless it went to the other worker.
    assert found["hits"]["cached_tokens"] in (0, 80)
    assert {each["request"] for each in found["slowest"]} == {"served-1", HOSTILE}


async def test_the_history_sees_the_running_sequence(paged: Paged) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            history = (await paged.data("overview"))["history"]
            # Its newest sample may still be of an earlier request.
            if history["contiguous"] and history["contiguous"][-1] == 81 + 1500:
                break
            await asyncio.sleep(0.2)
    stored, paged_, context = (history[name][-1] for name in ("stored", "paged", "context"))
    assert 81 <= stored <= paged_ < stored + 16
    assert context >= 81 + 1500
    assert len({len(column) for column in history.values()}) == 1


async def test_decisions_of_both_services_by_filter_and_page(paged: Paged) -> None:
    routed = await paged.routed()
    assert {each["request"] for each in routed} == REQUESTS
    assert {(each["kind"], each["service"]) for each in routed} == {("routing", "router")}
    assert len({each["id"] for each in routed}) == len(routed)
    first = next(each for each in reversed(routed) if each["request"] == "running-1")
    assert {each["name"] for each in first["candidates"]} == {"worker-0", "worker-1"}
    granted = await paged.data("decisions", service="kvmanager", kind="grant", request="served-1")
    assert {each["request"] for each in granted["records"]} == {"served-1"}


async def test_one_request_has_its_verdict_records_and_spans(paged: Paged) -> None:
    async with asyncio.timeout(PATIENCE):
        # Other services deliver their spans a little later.
        while True:
            found = await paged.data("request", id="served-1")
            if {"quire-router", "quire-gpuworker"} <= {each["service"] for each in found["spans"]}:
                break
            await asyncio.sleep(0.2)
    assert found["outcome"]["output_tokens"] == 3
    assert found["diagnosis"]["verdict"]["sentence"]
    assert found["diagnosis"]["advised"][0]["text"]
    assert {(each["service"], each["kind"]) for each in found["records"]} >= {
        ("router", "routing"),
        ("kvmanager", "grant"),
    }
    names = {each["name"].partition(" ")[0] for each in found["spans"]}
    assert names >= {"text_completion", "sequence"}
    assert (await paged.data("request", id="cmpl-served-1"))["request"] == "served-1"


async def test_routing_has_predicted_and_measured_times(paged: Paged) -> None:
    found = (await paged.data("routing"))["decisions"]
    assert {each["request"] for each in found} == REQUESTS
    # A request that was moved has no time to compare.
    ended = next(each for each in found if each["actual_s"] is not None)
    assert ended["actual_s"] > 0.0
    chosen = next(each for each in ended["candidates"] if each["name"] == ended["worker"])
    assert ended["predicted_s"] == pytest.approx(chosen["cost"] - chosen["terms"]["decode_pressure"])
    assert {each["actual_s"] for each in found if each["request"] == "running-1"} == {None}


async def test_the_block_map_leads_to_one_block_and_to_a_block_table(paged: Paged) -> None:
    worker = await until_recorded(paged)
    found = await paged.data("blocks", worker=worker, sequence=99_999)
    table = found["table"]
    assert (found["num_blocks"], table["request"]) == (BLOCKS, "running-1")
    block = await paged.data("block", worker=worker, block=table["blocks"][0])
    assert block["references"] == 1
    assert block["index"] == 0
    assert [each["request"] for each in block["holders"]] == ["running-1"]
    part = await paged.data("blocks", worker=worker, first=BLOCKS - 8, limit=100)
    assert (part["first"], len(part["uses"])) == (BLOCKS - 8, 12)


@pytest.mark.parametrize(
    ("name", "parameters", "status", "words"),
    [
        ("request", {"id": "nobody"}, 404, "no record of request nobody"),
        ("request", {"id": "a b"}, 400, "printable ASCII"),
        ("request", {}, 400, "id: is missing"),
        ("decisions", {"kind": "colour"}, 400, "expected one of admission"),
        ("decisions", {"limit": 201}, 400, "from 0 to 200"),
        ("decisions", {"page": "x"}, 400, "page_token"),
        ("decisions", {"service": "redis"}, 400, "router, kvmanager"),
        ("blocks", {"worker": "nobody"}, 404, "no worker nobody"),
        ("blocks", {}, 400, "worker: is missing"),
        ("blocks", {"worker": "worker-0", "limit": 65537}, 400, "from 0 to 65536"),
        ("block", {"worker": "worker-0", "block": BLOCKS}, 404, f"has no block {BLOCKS}"),
        ("overview", {"x": 1}, 400, "expected no parameter"),
    ],
)
async def test_wrong_questions_get_one_clear_answer(
    paged: Paged, name: str, parameters: dict[str, object], status: int, words: str
) -> None:
    found, message = await paged.refusal(name, **parameters)
    assert found == status
    assert words in message


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browser(tmp_path_factory.mktemp("profile")) as running:
        opened = await running.page()
        await opened.show(1360, 850)
        yield opened


async def shown(page: Page, url: str, view: str) -> None:
    """Open a view afresh, and wait until it has its first figures."""
    await page.open("about:blank")
    await page.open(url)
    await page.until(READY.format(view))


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("view", "script"),
    [
        ("overview", "document.querySelectorAll('.worker .stack i').length >= 2"),
        ("overview", "document.querySelectorAll('.uplot canvas').length === 4"),
        (
            "overview",
            "[...document.querySelectorAll('.card')].every((each) => each.hidden || each.innerText.length > 10)",
        ),
        ("requests", "document.querySelectorAll('tbody tr').length === 2"),
        ("request/served-1", "document.querySelector('.verdict .lead').textContent.length > 20"),
        ("request/served-1", "document.querySelectorAll('.timeline .mark').length >= 3"),
        ("request/served-1", "document.querySelectorAll('.timeline .span').length >= 2"),
        ("request/served-1", "document.querySelector('.advice a').pathname === '/page/runbook'"),
        ("routing", "document.querySelectorAll('.choice').length >= 3"),
        ("routing", "document.querySelectorAll('.scatter .dot').length >= 1"),
        ("blocks", "document.querySelectorAll('.legend li').length === 7"),
        ("decisions", "document.querySelectorAll('tbody tr').length >= 8"),
    ],
)
async def test_each_view_shows_live_data_without_a_complaint(
    paged: Paged, page: Page, view: str, script: str, scheme: str
) -> None:
    await page.show(1360, 850, scheme)
    await shown(page, f"{paged.url}#{view}", view.partition("/")[0])
    await page.until(script)
    # The whole page fits the width of the window.
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    dark = await page.run("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(15, 17, 21)") is (scheme == "dark")
    assert page.complaints == []


# What leaves its card, and stands in nothing that scrolls.
OUTSIDE = """[...document.querySelectorAll('.card *')].filter((each) => {
  for (let at = each; at; at = at.parentElement) if (getComputedStyle(at).overflowX !== 'visible') return false;
  return each.getBoundingClientRect().right > each.closest('.card').getBoundingClientRect().right + 1;
}).map((each) => each.outerHTML)"""
REACHED = """['pause', 'theme'].every((each) => {
  const {left, right, width} = document.getElementById(each).getBoundingClientRect();
  return width > 0 && left >= 0 && right <= innerWidth;
})"""


@needs_chromium
@pytest.mark.parametrize("view", ["overview", "requests", "request/served-1", "routing", "blocks", "decisions"])
async def test_on_a_phone_nothing_leaves_its_card(paged: Paged, page: Page, view: str) -> None:
    await page.show(390, 844)
    await shown(page, f"{paged.url}#{view}", view.partition("/")[0])
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert await page.run(OUTSIDE) == []
    assert await page.run(REACHED)


@needs_chromium
async def test_an_axis_reaches_the_data(paged: Paged, page: Page) -> None:
    await shown(page, f"{paged.url}#overview", "overview")

    async def marks(high: float, least: float = 0) -> object:
        return await page.run(f"import('./lib/chart.js').then((each) => each.scaleOf({high}, {least}).marks)")

    assert [await marks(high) for high in (230, 1440, 3)] == [[0, 100, 200, 300], [0, 500, 1000, 1500], [0, 1, 2, 3]]
    assert [await marks(high, 1) for high in (0, 1, 2, 24)] == [[0], [0, 1], [0, 1, 2], [0, 10, 20, 30]]


@needs_chromium
async def test_the_legend_of_a_pool_of_several_pages_counts_all_of_it(paged: Paged, page: Page) -> None:
    await shown(page, f"{paged.url}#blocks", "blocks")
    pool = "{ free: 19000, leased: 300, cached: 500, in_use: 200 }"
    counts = f"Object.assign(new Blocks('w'), {{ found: {{ num_blocks: 20000 }}, pool: {pool} }}).counts()"
    legend = await page.run(f"import('./views/blocks.js').then(({{ Blocks }}) => {counts})")
    assert legend == ["19,000", "300", None, None, None, None, "500"]


@needs_chromium
async def test_ids_of_clients_are_text_on_every_view(paged: Paged, page: Page) -> None:
    for view in ("overview", "requests", "routing", "decisions"):
        await shown(page, f"{paged.url}#{view}", view)
        await page.until(f"document.body.innerText.includes({HOSTILE!r})")
        assert await page.run("document.querySelectorAll('img').length") == 1
    await page.run(
        "[...document.querySelectorAll('a.id')].find((each) => each.textContent.includes('onerror')).click()"
    )
    await page.until(READY.format("request"))
    await page.until(f"document.querySelector('h1').textContent === {HOSTILE!r}")
    assert "owned" not in await page.run("document.title")
    assert page.complaints == []


@needs_chromium
async def test_the_keyboard_reaches_views_and_blocks(paged: Paged, page: Page) -> None:
    worker = await until_recorded(paged)
    await shown(page, paged.url, "overview")
    await page.press("4")
    await page.until(READY.format("blocks"))
    await page.run(f"location.hash = 'blocks/{worker}'")
    await page.until("document.querySelector('.paging .logical') !== null")
    await page.run("document.querySelector('canvas.map').focus()")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    await page.until("document.querySelector('.block-name b')?.textContent === 'Block 1'")
    await page.press("p")
    await page.until("document.getElementById('state').textContent === 'paused'")
    await page.press("t")
    assert await page.run("document.documentElement.dataset.theme") in ("light", "dark")
    assert page.complaints == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def of_groups(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Paged]:
    """A suite whose model has a full layer and two with a window; it runs one sequence of 100 tokens."""
    flags = ("--kv-blocks", f"{PAGES}", "--simulate", "base=600ms")
    options = StackOptions(model=checkpoint("gemma2"), workers=1, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("groups"), options) as suite:
        await suite.until_connected(1)
        url = f"http://{metrics_addresses(suite.stack.options)[0]}/page/"
        first = asyncio.Event()
        running = seeded([20 + number for number in range(100)], 300)
        task = asyncio.create_task(suite.generate(running, first_token=first))
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        yield Paged(suite, url)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# A map beside the page's own: the group of each cell, and whether a corner of the cell is painted.
CELLS = """import('./views/blocks.js').then(async ({ Blocks }) => {
  const blocks = new Blocks('');
  document.body.append(blocks.place);
  await blocks.refresh();
  const { columns, size, canvas } = blocks;
  const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const corner = (at) => (Math.floor(at / columns) * size + 1) * width + (at % columns) * size + 1;
  const painted = (at) => data[4 * corner(at) + 3] > 0;
  const found = [...blocks.groupOf].map((group, at) => [group, painted(at)]);
  blocks.close();
  blocks.place.remove();
  return found;
})"""


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pages_of_the_pool_show_the_group_of_their_block(of_groups: Paged, page: Page, scheme: str) -> None:
    await page.show(1360, 850, scheme)
    await shown(page, f"{of_groups.url}#blocks", "blocks")
    names = [(each["name"], each["pages"], each["layers"]) for each in (await of_groups.data("overview"))["groups"]]
    assert names == [("full", 1, 1), ("window of 8", 2, 2)]
    legend = await page.run("[...document.querySelectorAll('.legend li')].map((each) => each.innerText)")
    assert len(legend) == 9
    assert legend[7].startswith("Full")
    assert "2 pages a block" in legend[8]
    assert "one cell a page" in await page.run("document.body.innerText")
    found = await page.run(CELLS)
    assert {group for group, _ in found} == {0, 1, 255}
    assert [at for at, (group, painted) in enumerate(found) if painted is (group == 1)] == []
    assert page.complaints == []


@needs_chromium
async def test_a_further_page_shows_the_block_that_it_is_a_part_of(of_groups: Paged, page: Page) -> None:
    await shown(page, f"{of_groups.url}#blocks", "blocks")
    (worker,) = [each["worker"] for each in (await of_groups.data("overview"))["workers"]]
    blocks = [await of_groups.data("block", worker=worker, block=number) for number in range(PAGES)]
    first, further = next(each["pages"] for each in blocks if each["group"] and each["use"] > 2)
    await page.run("document.querySelector('canvas.map').focus()")
    for _ in range(further + 1):
        await page.press("ArrowRight")
    await page.until(f"document.querySelector('.block-name')?.innerText.includes('page {further} is a part of it')")
    told = await page.run("document.querySelector('.detail').innerText")
    assert f"Block {first}" in told
    assert "window of 8, 2 layers" in told
    assert f"{first}, {further}" in told


@needs_chromium
async def test_on_a_phone_groups_stay_in_their_card(of_groups: Paged, page: Page) -> None:
    await page.show(390, 844)
    for view in ("overview", "blocks"):
        await shown(page, f"{of_groups.url}#{view}", view)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert await page.run(OUTSIDE) == []


@needs_chromium
async def test_filters_of_decisions(paged: Paged, page: Page) -> None:
    await shown(page, f"{paged.url}#decisions/routing", "decisions")
    await page.until("document.querySelectorAll('tbody tr').length >= 3")
    await page.run("document.querySelector('.toggle').click()")
    assert "decode pressure" in await page.until("document.querySelector('.details')?.textContent")
    await page.run(
        "{ const field = document.getElementById('request'); field.value = 'served-1';"
        " field.dispatchEvent(new Event('change')); }"
    )
    rows = "[...document.querySelectorAll('tbody tr')]"
    await page.until(f"{rows}.some((each) => each.textContent.includes('served-1'))")
    await page.until(f"!{rows}.some((each) => each.textContent.includes('running-1'))")
    assert page.complaints == []

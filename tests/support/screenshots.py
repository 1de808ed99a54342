"""Takes the pictures of the page in docs/page, from a real suite under load: `make screenshots`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.support.browser import CHROMIUM, Page, browser
from tests.support.page_suite import load, page_suite

ROOT: Final = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 1360, 980
MOST_BYTES: Final = 300_000
# The pictures that are committed: view, scheme.
COMMITTED: Final = (
    ("overview", "light"),
    ("overview", "dark"),
    ("blocks", "light"),
    ("request", "light"),
    ("routing", "dark"),
    ("decisions", "dark"),
)
VIEWS: Final = ("overview", "requests", "request", "routing", "blocks", "decisions")
READY: Final = "document.body?.dataset.ready === '{}'"
# The id of a request that lost its blocks, or had the longest time to the first token.
SLOWEST: Final = (
    "fetch('data/requests?limit=200').then((each) => each.json()).then(({requests}) => requests"
    ".sort((a, b) => b.preemptions - a.preemptions || b.first_token_s - a.first_token_s)[0].request)"
)
# Clients at once, and seconds before the first picture: enough for the charts.
_CLIENTS, _SECONDS = 48, 75.0


async def main(out: Path, everything: bool, seconds: float) -> int:
    wanted = [(view, scheme) for view in VIEWS for scheme in ("light", "dark")] if everything else COMMITTED
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            page_suite(Path(folder) / "suite") as (suite, url),
            load(suite, _CLIENTS),
            browser(Path(folder) / "profile") as running,
        ):
            page = await running.page()
            await page.show(WIDTH, HEIGHT)
            await page.open(url)
            await page.until(READY.format("overview"))
            await asyncio.sleep(seconds)
            request = await page.run(SLOWEST)
            for view, scheme in wanted:
                picture = await taken(page, f"{url}#{view}", request, scheme)
                _write(out / f"{view}-{scheme}.png", picture)
    print(*page.complaints, sep="\n", file=sys.stderr)  # noqa: T201
    return int(bool(page.complaints))


async def taken(page: Page, address: str, request: str, scheme: str) -> bytes:
    """Return the picture of a view with live data; `request` is the one that the view of one request shows."""
    view = address.rpartition("#")[2]
    await page.open("about:blank")
    await page.show(WIDTH, HEIGHT, scheme)
    await page.open(f"{address}/{request}" if view == "request" else address)
    await page.until(READY.format(view))
    if view == "blocks":
        await page.run("document.querySelector('canvas.map').focus()")
        for _ in range(4):
            await page.press("ArrowDown")
        await page.until("document.querySelector('.block-name') !== null")
        await page.run("document.activeElement.blur()")
    # For the first frame of the charts, and a look at the next figures.
    await asyncio.sleep(2.5)
    return await page.picture()


def _write(path: Path, picture: bytes) -> None:
    if len(picture) > MOST_BYTES:
        sys.exit(f"{path} would have {len(picture)} bytes; expected at most {MOST_BYTES}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    print(f"{path}: {len(picture) // 1000} kB")  # noqa: T201


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    flags.add_argument("--all", action="store_true", help="every view, light and dark")
    flags.add_argument("--seconds", type=float, default=_SECONDS, help="of load before the first picture")
    args = flags.parse_args()
    if CHROMIUM is None:
        sys.exit("no chromium here; on Debian: apt-get install chromium")
    sys.exit(asyncio.run(main(args.out, args.all, args.seconds)))

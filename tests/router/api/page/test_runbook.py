"""The runbook as a page: what its markdown becomes, and that the file has no other kind of it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from router.api.page.runbook import RUNBOOK_FILE, page_of, runbook_page
from router.observe.diagnosis.causes import ADVICE, NOTHING, Advice


def main_of(page: str) -> str:
    return page.partition('<main class="runbook">\n')[2].partition("\n</main>")[0]


def test_headings_have_anchors_and_lines_become_paragraphs() -> None:
    page = page_of("# Runbook\n\nOne line\nand another.\n### QuireSlow, now\nTake `a < b` & *Lengths*.\n\nLast.\n")
    assert main_of(page).splitlines() == [
        '<h1 id="runbook">Runbook</h1>',
        "<p>One line and another.</p>",
        '<h3 id="quireslow-now">QuireSlow, now</h3>',
        "<p>Take <code>a &lt; b</code> &amp; <em>Lengths</em>.</p>",
        "<p>Last.</p>",
    ]


def test_the_page_shows_all_of_the_file_and_nothing_that_it_cannot_show() -> None:
    text = RUNBOOK_FILE.read_text()
    assert re.findall(r"^(?:[*|>]|\d+\.|```|####).*|\]\(|\*\*", text, re.MULTILINE) == []
    shown = re.sub(r"<[^>]+>", "", main_of(runbook_page()))
    plain = re.sub(r"^#+ |[`*]", "", text, flags=re.MULTILINE)
    assert (
        shown.split()
        == plain.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;").replace("'", "&#x27;").split()
    )


@pytest.mark.parametrize("advice", [*ADVICE.values(), NOTHING], ids=lambda each: each.anchor)
def test_each_link_leads_to_one_place(advice: Advice) -> None:
    assert runbook_page().count(f'id="{advice.anchor}"') == 1


def test_no_two_headings_have_one_anchor() -> None:
    assert max(Counter(re.findall(r' id="([^"]+)"', runbook_page())).values()) == 1

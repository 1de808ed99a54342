"""The runbook as a page: `runbook.md` beside this file, made into HTML. It has headings and paragraphs alone."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUNBOOK_FILE: Final = Path(__file__).parent / "runbook.md"
_HEADING: Final = re.compile(r"(#{1,3}) (.+)")
# The style sheet is that of the page; the policy for contents allows no style within.
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Quire: runbook</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="style.css">
</head>
<body>
<header class="bar"><a class="brand" href="./"><img src="icon.svg" alt="" width="20" height="20">Quire</a></header>
<main class="runbook">
{}
</main>
</body>
</html>
"""


def runbook_page() -> str:
    """Return the page of the installed runbook."""
    return page_of(RUNBOOK_FILE.read_text())


def page_of(markdown: str) -> str:
    """Return the page of headings and paragraphs, with `code` and *names* in them; each heading has its anchor."""
    return _PAGE.format("\n".join(_blocks(markdown)))


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as sites that show markdown make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _blocks(markdown: str) -> Iterator[str]:
    paragraph: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        heading = _HEADING.fullmatch(line)
        if paragraph and (heading is not None or not line):
            yield f"<p>{_inline(' '.join(paragraph))}</p>"
            paragraph.clear()
        if heading is not None:
            level, words = len(heading[1]), heading[2]
            yield f'<h{level} id="{anchor_of(words)}">{_inline(words)}</h{level}>'
        elif line:
            paragraph.append(line)


def _inline(text: str) -> str:
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked)

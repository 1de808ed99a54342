"""The advice on each cause is one sentence of its own, which the runbook has under the anchor that the advice names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import router.api.page
from router.observe.diagnosis.causes import ADVICE, NOTHING, Advice, Cause, advice_for

ALL = [*ADVICE.values(), NOTHING]
CAUSES = [each for each in Cause if each is not Cause.NOT_KNOWN]
_MOST_WORDS = 25


def sections() -> dict[str, str]:
    """Return the text of each section of the runbook by its anchor: in one line, in small letters, without markdown."""
    page = (Path(router.api.page.__file__).parent / "runbook.md").read_text()
    parts = re.split(r"^#+ (.+)$", page, flags=re.MULTILINE)[1:]
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2]]
    return dict(
        zip(anchors, (" ".join(re.sub(r"[`*]", "", text).lower().split()) for text in parts[1::2]), strict=True)
    )


@pytest.mark.parametrize("advice", ALL, ids=lambda each: each.text[:30])
def test_the_runbook_says_what_the_advice_says(advice: Advice) -> None:
    assert advice.text.lower().rstrip(".") in sections()[advice.anchor]


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_one_plain_sentence(cause: Cause) -> None:
    """No fragment of a page, no markdown, no name of a section, and no second sentence."""
    text = advice_for(cause).text
    assert re.fullmatch(r"[A-Z][^.!?`*#\[\]()<>]+\.", text), text
    assert len(text.split()) <= _MOST_WORDS
    assert not re.search(r"Quire[A-Z]|^As |^Or |^If |: this is|evicted:|seen:", text)


def test_no_two_causes_share_a_sentence() -> None:
    assert {*ADVICE} == {*CAUSES}
    assert len({each.text for each in ALL}) == len(ALL)


def test_a_link_leads_to_where_the_runbook_is_served() -> None:
    advice = advice_for(Cause.BLOCKS)
    assert advice.link() == "/page/runbook#quireblocksshort"
    assert advice.link("http://router:51051/page/runbook") == "http://router:51051/page/runbook#quireblocksshort"

"""The advice on each cause stands in the runbook, word for word, under the anchor that the advice names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.core.diagnosis.causes import ADVICE, NOTHING, RUNBOOK, Advice, Cause, advice_for

PAGE = Path(__file__).resolve().parents[4] / RUNBOOK


def sections() -> dict[str, str]:
    """Return the text of each section of the runbook by its anchor, in one line."""
    parts = re.split(r"^#+ (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2]]
    return dict(zip(anchors, (" ".join(text.split()) for text in parts[1::2]), strict=True))


@pytest.mark.parametrize("advice", [*dict.fromkeys([*ADVICE.values(), NOTHING])], ids=lambda each: each.anchor)
def test_the_runbook_says_what_the_advice_says(advice: Advice) -> None:
    text = sections()[advice.anchor]
    assert all(sentence in text for sentence in re.split(r"(?<=\.) (?=[A-Z])", advice.text)), (advice.text, text)


@pytest.mark.parametrize("cause", [each for each in Cause if each is not Cause.NOT_KNOWN])
def test_every_cause_has_advice(cause: Cause) -> None:
    assert advice_for(cause) is not NOTHING

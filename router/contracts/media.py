"""Parts of a conversation that are not text. A text stands in for each, so that the conversation goes on without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

# The types of parts in the client APIs, and what they hold.
_MEDIA: Final = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), "file"),
}


def medium_of(part_type: Any) -> str | None:
    """Return what a part of this type holds: image, audio, video or file; None of another part."""
    return _MEDIA.get(part_type) if isinstance(part_type, str) else None


def stand_in(medium: str) -> str:
    """Return the text that the model reads in place of a part."""
    return f"[Left out: {medium}. Only text reaches the model.]"


def note_of(media: Iterable[str]) -> str:
    """Return what the client should know of the parts that were left out."""
    counts = ", ".join(f"{medium} ({count})" for medium, count in Counter(media).items())
    return f"only text reaches the model; left out: {counts}"

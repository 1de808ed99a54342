"""Chat templates in the manner of released model families: shortened, with the same demands on messages.

Each shows what its family shows: text or parts, messages of the system, calls of tools and their results. A line break
behind a block is left out when a template is rendered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).with_name("chat_templates")
FAMILIES: Final = {file.stem: file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.jinja"))}

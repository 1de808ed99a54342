"""The configuration of a checkpoint with the numbers that transformers would add: config.json may leave out defaults.

Processes without transformers read `model_defaults.json`: the defaults of each kind of causal language model.
`make models-matrix` writes that file; a test compares it with the installed transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DEFAULTS: Final = Path(__file__).with_name("model_defaults.json")
TEXT: Final = "text_config"


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with defaults where it has no entry; also in the `text_config` of a multi-modal one.

    What the file says wins, null too. A kind that is not known is returned as it is.
    """
    own = _defaults().get(str(config.get("model_type")), {})
    text = config.get(TEXT)
    if TEXT not in own and not isinstance(text, dict):
        return {**own, **config}
    inner = text if isinstance(text, dict) else {}
    kind = inner.get("model_type") or own.get(TEXT)
    return {**config, TEXT: {**_defaults().get(str(kind), {}), **inner}}


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the text model: of a multi-modal one those of its `text_config`, over the others."""
    text = config.get(TEXT)
    return {**config, **text} if isinstance(text, dict) else dict(config)


@functools.cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found

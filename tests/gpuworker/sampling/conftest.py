"""The ways in which a token is drawn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuworker.native.library import NativeUnavailable, levels_here, use_level
from gpuworker.sampling import sampler


@pytest.fixture(autouse=True, params=[*levels_here(), "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Draw by the native library of each level that this processor runs and, as where none was built, by torch."""
    way = str(request.param)
    if way == "torch":
        monkeypatch.setattr(sampler, "native_rows", lambda *_: None)
        yield way
        return
    try:
        use_level(way)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    yield way
    use_level("auto")

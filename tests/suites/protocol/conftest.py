"""The long searches run only when asked for: `pytest -m exhaustive tests/suites/protocol`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: searches of the lease protocol that take minutes; not run by default"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "exhaustive" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("exhaustive")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]

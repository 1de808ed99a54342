"""docs/clients.md says what the tests of foreign clients are; every environment and every file of tests is on it."""

from __future__ import annotations

import pytest

from tests.suites.clients import page

# They call Quire by its own client, or by generated stubs.
OWN = {"test_python_client.py", "test_kserve_streams.py", "test_vllm_stubs.py"}


def test_the_page_is_that_of_the_tests() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python -m tests.suites.clients.page"


def test_every_client_has_tests_and_every_test_of_a_client_is_on_the_page() -> None:
    assert all([*page.tested(client)] for client in page.CLIENTS)
    files = {path.name for path in (page.ROOT / page.HERE).glob("test_*.py")}
    assert files - OWN == {file.rpartition("/")[2] for each in page.CLIENTS for file in each.files if page.HERE in file}


def test_every_environment_is_of_a_client_on_the_page() -> None:
    names = {path.stem for path in (page.ROOT / page.ENVIRONMENTS).glob("*.txt")}
    # The AI SDK's versions stand in its package.json; its environment has Node.
    assert names == {client.environment for client in page.CLIENTS if client.environment} | {"ai-sdk"}


def test_a_client_that_is_not_pinned_is_found() -> None:
    unknown = page.Client("x", "no-such-package", f"{page.ENVIRONMENTS}/light.txt", ())
    with pytest.raises(ValueError, match="does not pin no-such-package"):
        page.version(unknown)

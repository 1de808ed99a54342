"""A worker's adapters: loads go beside other work, stay within the folder, and name what changed meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from common.contracts.adapters import AdapterRef, AdapterShare
from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidConfig, InvalidRequest, NotFound, Overloaded, PermissionDenied, Unavailable
from common.contracts.limits import MAX_ADAPTER_PATH_CHARS
from gpuworker.plane.adapters import ADAPTER_FILES, AdapterLimits, AdapterStore, ReadAdapter, UnfitAdapter
from gpuworker.scheduling.adapter_table import CLAIM_S, TURN_S

CONTENT = "a" * 64


class Folders:
    """Reads folders without files: the content of each is what a test says, and a read can be held."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.reads: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.clock = ManualClock()

    def read(self, folder: Path) -> ReadAdapter:
        self.reads.append(folder.name)
        self.begun.set()
        assert self.go_on.wait(60)
        if folder.name not in self.contents:
            raise UnfitAdapter("it is not there")
        return ReadAdapter(self.contents[folder.name], 4, 100, f"weights of {folder.name}")


def opened(folders: Folders, root: Path | None = None, most: int = 2) -> AdapterStore:
    return AdapterStore(folders.read, AdapterLimits(most, root), lambda: None, folders.clock.monotonic)


def known(store: AdapterStore) -> dict[str, bool]:
    return {each.name: each.in_memory for each in store.message().adapters}


def test_all_of_the_command_line_are_read_and_the_first_stay() -> None:
    folders = Folders()
    folders.contents = {"a": "1", "b": "2", "c": "3"}
    store = opened(folders)
    store.load_at_start((name, Path(name)) for name in "abc")
    assert known(store) == {"a": True, "b": True, "c": False}


def test_all_unfit_ones_are_named_at_once() -> None:
    folders = Folders()
    folders.contents = {"a": "1"}
    with pytest.raises(InvalidConfig) as refused:
        opened(folders).load_at_start((name, Path(name)) for name in "axy")
    found = [(each.field, each.description) for each in refused.value.violations]
    assert found == [("--lora", f"{name}={name}: it is not there") for name in "xy"]


async def test_steps_go_on_while_an_adapter_is_read(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT}, opened(folders, tmp_path)
    folders.go_on.clear()
    load = asyncio.create_task(store.load(AdapterRef("sql", ""), "a"))
    await asyncio.to_thread(folders.begun.wait, 60)
    assert known(store) == {}  # the loop is free, and nothing is half there
    folders.go_on.set()
    await load
    assert store.find("sql", CONTENT).weights == "weights of a"


async def test_a_cold_one_is_read_again_and_one_in_memory_is_not(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path, most=1)
    await store.load(AdapterRef("a", ""), "a")
    await store.load(AdapterRef("a", CONTENT))
    assert folders.reads == ["a"]
    await store.load(AdapterRef("b", ""), "b")
    assert known(store) == {"a": False, "b": True}
    await store.load(AdapterRef("a", CONTENT))
    assert known(store) == {"a": True, "b": False}
    assert folders.reads == ["a", "b", "a"]


async def test_an_earlier_content_of_a_name_is_not_loaded_in_place_of_the_new_one(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path)
    await store.load(AdapterRef("x", ""), "a")
    await store.load(AdapterRef("x", ""), "b")
    with pytest.raises(Unavailable, match="has another content at this worker"):
        await store.load(AdapterRef("x", CONTENT))
    assert store.find("x", "2").weights == "weights of b"


async def test_one_that_is_unloaded_while_it_is_read_stays_unloaded(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path, most=1)
    for name in "ab":
        await store.load(AdapterRef(name, ""), name)
    folders.begun.clear()
    folders.go_on.clear()
    load = asyncio.create_task(store.load(AdapterRef("a", CONTENT)))
    await asyncio.to_thread(folders.begun.wait, 60)
    store.unload("a")
    folders.go_on.set()
    with pytest.raises(NotFound, match="was unloaded while it was read"):
        await load
    assert known(store) == {"b": True}


async def test_one_that_changed_on_disk_is_no_other_adapter_under_its_name(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path, most=1)
    await store.load(AdapterRef("a", ""), "a")
    await store.load(AdapterRef("b", ""), "b")
    folders.contents["a"] = "changed"
    with pytest.raises(NotFound, match=r"^adapter 'a' has changed on its disk since it was loaded; ask the operator"):
        await store.load(AdapterRef("a", CONTENT))
    del folders.contents["a"]
    with pytest.raises(NotFound, match=r"^adapter 'a' cannot be read any more; ask the operator"):
        await store.load(AdapterRef("a", CONTENT))
    folders.contents["a"] = "changed"
    await store.load(AdapterRef("a", ""), "a")
    assert store.find("a", "changed").fingerprint == "changed"


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a/../../x"])
async def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    store = opened(Folders(), (tmp_path / "root").resolve())
    with pytest.raises(PermissionDenied, match="are loaded from below"):
        await store.load(AdapterRef("x", ""), path)


@pytest.mark.parametrize("file", ADAPTER_FILES)
async def test_no_link_of_a_file_leads_out_of_the_folder(tmp_path: Path, file: str) -> None:
    folders, root = Folders(), (tmp_path / "root").resolve()
    folders.contents, store = {"a": CONTENT, "b": CONTENT}, opened(folders, root)
    root.mkdir()
    for name, target in (("a", tmp_path / "out"), ("b", root / "blob")):
        write(root, name)
        target.write_text("x")
        (root / name / file).unlink()
        (root / name / file).symlink_to(target)
    with pytest.raises(PermissionDenied, match="are loaded from below"):
        await store.load(AdapterRef("x", ""), "a")
    for _ in range(2):
        await store.look_at_root()
    assert known(store) == {"b": True}
    assert folders.reads == ["b"]


async def test_links_in_a_circle_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    store = opened(Folders(), tmp_path)
    with pytest.raises(InvalidRequest):
        await store.load(AdapterRef("x", ""), "loop")
    for _ in range(2):
        await store.look_at_root()
    assert known(store) == {}


@pytest.mark.parametrize("path", ["x" * (MAX_ADAPTER_PATH_CHARS + 1), "x\0y"])
async def test_a_path_is_bounded(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ADAPTER_PATH_CHARS} characters"):
        await opened(Folders(), tmp_path).load(AdapterRef("x", ""), path)


async def test_without_a_folder_nothing_is_loaded_from_anywhere() -> None:
    with pytest.raises(PermissionDenied, match="start it with --lora-dir"):
        await opened(Folders()).load(AdapterRef("x", ""), "x")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "x" * 129, "x\n"])
async def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="letters, digits, dots"):
        await opened(Folders(), tmp_path).load(AdapterRef(name, ""), "x")


async def test_routers_are_told_of_each_change(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store, told = {"a": CONTENT}, opened(folders, tmp_path), list[dict[str, bool]]()
    store.changed = lambda: told.append(known(store))
    await store.load(AdapterRef("a", ""), "a")
    store.unload("a")
    assert told == [{"a": True}, {}]
    with pytest.raises(NotFound):
        store.unload("a")


# ------------------------------------------------------------ the folder


def write(root: Path, name: str, content: str = "x") -> None:
    (root / name).mkdir(exist_ok=True)
    for file in ADAPTER_FILES:
        (root / name / file).write_text(content)


async def test_a_folder_is_taken_at_the_second_look_that_finds_it_unchanged(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT}, opened(folders, tmp_path)
    write(tmp_path, "a")
    await store.look_at_root()
    assert known(store) == {}
    write(tmp_path, "a", "still being written")
    await store.look_at_root()
    assert known(store) == {}
    await store.look_at_root()
    assert known(store) == {"a": True}
    await store.look_at_root()
    assert folders.reads == ["a"]


async def test_a_folder_that_changes_is_read_again_and_one_that_has_gone_is_forgotten(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT}, opened(folders, tmp_path)
    write(tmp_path, "a")
    for _ in range(2):
        await store.look_at_root()
    folders.contents["a"] = "changed"
    write(tmp_path, "a", "longer than before")
    for _ in range(2):
        await store.look_at_root()
    assert store.find("a", "changed").weights == "weights of a"
    shutil.rmtree(tmp_path / "a")
    await store.look_at_root()
    assert known(store) == {}


async def test_what_is_no_adapter_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = Folders()
    folders.contents, store = {"good": CONTENT, "own": "2"}, opened(folders, tmp_path)
    store.load_at_start([("own", Path("own"))])
    for name in ("good", "-bad", "unfit", "own"):
        write(tmp_path, name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for _ in range(3):
        await store.look_at_root()
    assert known(store) == {"own": True, "good": True}
    assert folders.reads == ["own", "good", "unfit"]
    assert "own is loaded from own" in caplog.text


async def test_folders_never_drive_others_out_of_memory(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = dict.fromkeys("abc", CONTENT), opened(folders, tmp_path)
    for name in "abc":
        write(tmp_path, name)
    for _ in range(2):
        await store.look_at_root()
    assert known(store) == {"a": True, "b": True, "c": False}


async def test_a_new_one_is_known_where_memory_is_in_use_and_waits_for_room(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path, most=1)
    await store.load(AdapterRef("a", ""), "a")
    used = store.find("a", CONTENT)
    store.use(used)
    await store.load(AdapterRef("b", ""), "b")
    assert known(store) == {"a": True, "b": False}
    with pytest.raises(Overloaded, match="all 1 adapters in memory are in use"):
        await store.load(AdapterRef("b", "2"))
    store.release(used)
    await store.load(AdapterRef("b", "2"))
    assert known(store) == {"a": False, "b": True}


async def test_routers_are_told_that_one_closes_for_a_load_that_waits_and_that_it_is_open_again(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2"}, opened(folders, tmp_path, most=1)
    for name in "ab":
        await store.load(AdapterRef(name, ""), name)
    told = list[dict[str, bool]]()
    store.changed = lambda: told.append(known(store))
    used = store.find("b", "2")
    store.use(used)
    for _ in range(3):
        with pytest.raises(Overloaded):
            await store.load(AdapterRef("a", CONTENT))
        folders.clock.advance(TURN_S)
    assert told == [{"a": False, "b": False}]
    assert store.find("b", "2") is used  # what was on its way here is served
    with pytest.raises(Overloaded, match="1 other loads come first"):
        await store.load(AdapterRef("b", "2"))
    folders.clock.advance(CLAIM_S + 1)
    await store.load(AdapterRef("b", "2"))
    assert told[1:] == [{"a": False, "b": True}]
    assert folders.reads == ["a", "b"]


async def test_a_load_keeps_its_place_while_another_adapter_is_read_for_long(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT, "b": "2", "slow": "3"}, opened(folders, tmp_path, most=1)
    for name in "ab":
        await store.load(AdapterRef(name, ""), name)
    store.use(store.find("b", "2"))
    with pytest.raises(Overloaded):
        await store.load(AdapterRef("a", CONTENT))
    folders.go_on.clear()
    folders.begun.clear()
    slow = asyncio.create_task(store.load(AdapterRef("slow", ""), "slow"))
    await asyncio.to_thread(folders.begun.wait, 60)
    folders.clock.advance(CLAIM_S + 1)
    folders.go_on.set()
    await slow
    with pytest.raises(Overloaded):
        await store.load(AdapterRef("a", CONTENT))
    assert known(store)["b"] is False, "it closes for the load that has waited since before"


async def test_a_tenants_folder_is_all_that_it_loads_from(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT}, opened(folders, tmp_path)
    share = AdapterShare("acme", ("acme-*",))
    await store.load(AdapterRef("acme-a", ""), "acme/a", share, "acme")
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "out").symlink_to(tmp_path / "other")
    for path in ("a", "other/a", "acme/../a", "acme/out/a", "acme-2/a"):
        with pytest.raises(PermissionDenied, match=r"from below the folder acme of --lora-dir alone"):
            await store.load(AdapterRef("acme-b", ""), path, share, "acme")
    assert folders.reads == ["a"]


async def test_one_larger_than_its_tenant_may_have_is_not_even_known(tmp_path: Path) -> None:
    folders = Folders()
    folders.contents, store = {"a": CONTENT}, opened(folders, tmp_path)
    with pytest.raises(PermissionDenied, match=r"takes 100 bytes .* all of tenant acme may take 99 \(adapter_bytes\)"):
        await store.load(AdapterRef("acme-a", ""), "a", AdapterShare("acme", ("acme-*",), 99))
    assert known(store) == {}
    await store.load(AdapterRef("other", ""), "a", AdapterShare("acme", ("acme-*",), 99))

"""What the names of --manager stand for, as DNS answers change."""

from __future__ import annotations

import logging

import pytest

from common.contracts.limits import MAX_NAMED_MANAGERS
from common.group.names import ManagerNames

NAME = "managers.test:50052"


def test_a_name_of_one_address_stands_for_itself() -> None:
    names = ManagerNames([NAME, "10.0.0.9:50052", "[::1]:50052", NAME])
    assert names.to_resolve == (NAME,)
    names.take(NAME, ["10.0.0.1"])
    assert list(names.addresses) == [NAME, "10.0.0.9:50052", "[::1]:50052"]


def test_a_name_of_several_addresses_stands_for_all_of_them_in_one_order() -> None:
    names = ManagerNames([NAME, "other.test:1"])
    names.take(NAME, ["10.0.0.10", "10.0.0.2", "10.0.0.10"])
    assert list(names.addresses) == ["10.0.0.2:50052", "10.0.0.10:50052", "other.test:1"]
    names.take(NAME, ["10.0.0.10", "10.0.0.2"])
    assert names.addresses[:2] == ("10.0.0.2:50052", "10.0.0.10:50052")


def test_addresses_come_and_go() -> None:
    names = ManagerNames([NAME])
    names.take(NAME, ["10.0.0.1", "10.0.0.2"])
    names.take(NAME, ["10.0.0.2", "10.0.0.3"])
    assert list(names.addresses) == ["10.0.0.2:50052", "10.0.0.3:50052"]
    names.take(NAME, ["10.0.0.3"])
    assert list(names.addresses) == ["10.0.0.3:50052"], "an address again, not the name: its watch goes on"


def test_an_address_that_dns_lost_stays_while_its_manager_is_reachable() -> None:
    names = ManagerNames([NAME])
    names.take(NAME, ["10.0.0.1", "10.0.0.2"])
    names.take(NAME, ["10.0.0.3"], reachable={"10.0.0.1:50052"})
    assert list(names.addresses) == ["10.0.0.1:50052", "10.0.0.3:50052"]
    names.take(NAME, [])
    assert list(names.addresses) == ["10.0.0.1:50052", "10.0.0.3:50052"], "no answer changes nothing"
    names.take(NAME, ["10.0.0.3"])
    assert list(names.addresses) == ["10.0.0.3:50052"]


def test_addresses_of_both_families_are_those_of_the_same_machines() -> None:
    names = ManagerNames([NAME])
    names.take(NAME, ["::1", "127.0.0.1"])
    assert list(names.addresses) == [NAME], "one machine, and gRPC tries both"
    names.take(NAME, ["fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"])
    assert list(names.addresses) == ["10.0.0.1:50052", "10.0.0.2:50052"]
    other = ManagerNames([NAME])
    other.take(NAME, ["fd00::2", "fd00::1", "10.0.0.1"])
    assert list(other.addresses) == ["[fd00::1]:50052", "[fd00::2]:50052"]


def test_of_too_many_addresses_the_first_are_followed_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names, many = ManagerNames([NAME]), [f"10.0.{high}.{low}" for high in range(4) for low in range(200)]
    with caplog.at_level(logging.WARNING):
        names.take(NAME, many)
        names.take(NAME, many)
    assert len(names.addresses) == MAX_NAMED_MANAGERS
    assert len(caplog.records) == 1
    assert "has 800 addresses; the first 64 are followed" in caplog.text


def v4(*lasts: int) -> list[str]:
    return [f"10.0.0.{last}" for last in lasts]


def v6(*lasts: int) -> list[str]:
    return [f"fd00::{last}" for last in lasts]


def named(*hosts: str) -> list[str]:
    return [f"[{host}]:50052" if ":" in host else f"{host}:50052" for host in hosts]


def test_after_an_answer_without_one_family_each_machine_counts_once_again() -> None:
    names, both = ManagerNames([NAME]), [*v4(1, 2, 3), *v6(1, 2, 3)]
    names.take(NAME, both)
    names.take(NAME, v6(1, 2, 3), reachable=named(*both))
    assert list(names.addresses) == named(*both), "nothing says that these are the same machines"
    names.take(NAME, both, reachable=named(*both))
    assert list(names.addresses) == named(*v4(1, 2, 3))


def test_the_family_of_before_stays_while_the_other_one_has_no_more_addresses() -> None:
    names, both = ManagerNames([NAME]), [*v4(1, 2), *v6(1, 2)]
    names.take(NAME, v6(1, 2))  # half of an answer
    names.take(NAME, both, reachable=named(*both))
    assert list(names.addresses) == named(*v6(1, 2))
    names.take(NAME, [*v4(1, 2), *v6(1)], reachable=named(*both))
    assert list(names.addresses) == named(*v6(1, 2), *v4(1, 2)), "no reachable manager is left"
    names.take(NAME, both, reachable=named(*both))
    assert list(names.addresses) == named(*v6(1, 2))


def test_machines_move_to_the_other_family_one_by_one() -> None:
    names = ManagerNames([NAME])
    names.take(NAME, v4(1, 2, 3))
    names.take(NAME, [*v4(1), *v6(2, 3)], reachable=named(*v4(1), *v6(2, 3)))
    assert list(names.addresses) == named(*v4(1), *v6(2, 3))
    names.take(NAME, v6(1, 2, 3), reachable=named(*v6(1, 2, 3)))
    assert list(names.addresses) == named(*v6(2, 3), *v6(1))

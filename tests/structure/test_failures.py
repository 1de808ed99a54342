"""Every failure that a document promises to survive is injected by `bench.faults`, or has a test that is named here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from bench.fault_injection.plan import Kind

ROOT = Path(__file__).parents[2]
SUITES, ROUTER, WORKER, MANAGER = "tests/suites", "tests/router/requests", "tests/gpuworker", "tests/kvmanager"

# The first column of the table in ARCHITECTURE.md. A test is named by its file and its function.
ROWS: dict[str, tuple[Kind | str, ...]] = {
    "manager killed": (
        Kind.MANAGER_KILLED,
        Kind.MANAGER_STOPPED,
        Kind.MANAGER_FROZEN,
        Kind.MANAGER_DRAINED,
        Kind.MANAGER_GONE,
    ),
    "two managers": (
        Kind.LEADER_KILLED,
        Kind.LEADER_FENCED,
        Kind.LEADER_ISOLATED,
        Kind.MANAGERS_APART,
        f"{SUITES}/e2e/test_chaos.py::test_a_second_manager_takes_over_and_is_replaced_in_turn",
        f"{SUITES}/e2e/test_shards.py::test_a_killed_manager_concerns_its_own_worker_alone",
    ),
    "router killed, or stands still": (
        Kind.ROUTER_KILLED,
        Kind.ROUTER_STOPPED,
        Kind.ROUTER_FROZEN,
        Kind.ROUTER_DRAINED,
        (
            f"{WORKER}/server/test_silent_routers.py::"
            "test_what_a_silent_router_holds_goes_on_elsewhere_while_its_stream_is_open"
        ),
        f"{SUITES}/e2e/test_resume.py::test_the_client_goes_on_although_its_router_stands_still",
    ),
    "worker killed, or drained with `--drain migrate`": (
        Kind.WORKER_KILLED,
        Kind.WORKER_STOPPED,
        Kind.WORKER_FROZEN,
        Kind.WORKER_DRAINED,
        Kind.ALL_DRAINED,
    ),
    "a prefill worker killed, drained or slow while it computes a prompt": (
        Kind.PREFILL_WORKER_KILLED,
        Kind.PREFILL_WORKER_STOPPED,
        Kind.PREFILL_WORKER_FROZEN,
        Kind.PREFILL_WORKER_DRAINED,
        Kind.DECODE_WORKER_KILLED,
        f"{SUITES}/e2e/test_remote_prefill.py::test_workers_that_die_amid_prompts_cost_no_token",
        f"{ROUTER}/test_remote_prefill.py::test_whatever_ends_the_prompt_the_request_is_served",
        f"{ROUTER}/test_remote_prefill.py::test_a_prompt_that_takes_too_long_is_given_up",
    ),
    "Redis down, wiped or overwritten": (
        Kind.REDIS_KILLED,
        Kind.REDIS_STOPPED,
        Kind.REDIS_FROZEN,
        Kind.REDIS_WIPED,
        Kind.REDIS_OVERWRITTEN,
        f"{SUITES}/e2e/test_resources.py::test_a_redis_that_cannot_save_holds_up_the_index_alone",
    ),
    "packets late or lost, hosts cut off, another address": (
        Kind.PACKETS_LOST,
        Kind.LINKS_SLOW,
        Kind.ROUTER_WITHOUT_WORKER,
        Kind.MANAGER_WITHOUT_WORKER,
        Kind.LEADER_WITHOUT_REDIS,
        Kind.ROUTER_WITHOUT_REDIS,
        Kind.ROUTER_WITHOUT_MANAGERS,
        Kind.CLIENT_WITHOUT_ROUTER,
        Kind.WORKER_MOVED,
    ),
    "client gone or too slow, deadline passed, key removed, abort": (
        Kind.CLIENTS_GONE,
        Kind.DEADLINES_PASSED,
        Kind.REQUESTS_ABORTED,
        f"{ROUTER}/test_inbox.py::test_output_that_a_client_leaves_unread_ends_its_sequences_once",
        f"{SUITES}/e2e/test_tenants.py::test_a_revoked_key_ends_open_streams_and_those_of_others_go_on",
        f"{SUITES}/e2e/test_operation.py::test_a_tenant_aborts_its_own_request_through_any_router_and_no_other",
        (
            f"{WORKER}/engine/test_engine.py::"
            "test_a_cancelled_sequence_is_in_no_later_plan_and_its_blocks_return_within_two_steps"
        ),
    ),
    "a background task ends, or work stands still": (
        "tests/common/process/test_supervised.py::test_a_task_that_raises_is_logged_reported_and_begun_again",
        "tests/common/process/test_supervised.py::test_a_task_that_cannot_be_begun_again_is_lost",
        "tests/common/process/test_watchdog.py::test_work_that_waits_for_longer_than_the_bound_is_named_and_not_before",
        f"{MANAGER}/ledger/test_watchdog.py::test_waiting_beside_free_blocks_with_nothing_running_is_a_stall",
    ),
    "a step cannot be built; a request crashes its worker twice or exhausts memory": (
        f"{WORKER}/engine/test_engine.py::test_of_a_step_that_cannot_be_built_the_cause_ends_and_the_others_go_on",
        f"{ROUTER}/test_broken_connections.py::test_a_request_whose_workers_end_twice_is_refused",
        "tests/common/rpc/test_malformed.py::test_a_message_for_which_there_is_no_memory_is_no_mistake_of_its_caller",
    ),
    "a clock jumps; disk, descriptors or memory run out": (
        Kind.MANAGER_CLOCK,
        Kind.ROUTER_CLOCK,
        Kind.WORKER_CLOCK,
        Kind.REDIS_CLOCK,
        Kind.MANAGER_WITHOUT_DISK,
        Kind.ROUTER_WITHOUT_DISK,
        Kind.MANAGER_WITHOUT_FILES,
        Kind.ROUTER_WITHOUT_FILES,
        Kind.WORKER_WITHOUT_FILES,
        Kind.MANAGER_WITHOUT_MEMORY,
        Kind.ROUTER_WITHOUT_MEMORY,
        Kind.WORKER_WITHOUT_MEMORY,
    ),
    "a worker dies, or stands still, while another one fetches its blocks": (
        Kind.FETCH_SOURCE_KILLED,
        Kind.FETCH_SOURCE_STOPPED,
        Kind.FETCH_TARGET_KILLED,
        Kind.FETCH_TARGET_STOPPED,
        Kind.FETCH_MANAGER_KILLED,
        Kind.FETCH_MANAGER_STOPPED,
        f"{SUITES}/e2e/test_peer_fetch.py::test_a_source_that_dies_or_stands_still_in_the_middle_is_a_miss",
        f"{SUITES}/e2e/test_peer_fetch.py::test_a_destination_that_is_killed_in_the_middle_fetches_again_once_it_is_back",
    ),
    "the NIXL of a worker ends, or does not reach a peer": (
        f"{WORKER}/peers/test_nixl.py::test_an_agent_that_is_killed_ends_no_worker_and_stays_ended",
        f"{WORKER}/peers/test_nixl.py::test_a_source_that_nixl_does_not_reach_is_asked_over_tcp_from_then_on",
    ),
    "blocks leave a worker, or a reset comes, while another one fetches them": (
        f"{SUITES}/e2e/test_peer_fetch.py::test_what_the_source_has_evicted_meanwhile_is_a_miss",
        f"{SUITES}/e2e/test_peer_fetch.py::test_a_reset_in_the_middle_leaves_no_hit",
    ),
    "either end of a copy ahead of need dies, or a reset comes": (
        f"{SUITES}/e2e/test_prefetch.py::test_a_source_that_is_killed_in_the_middle_is_a_miss",
        f"{SUITES}/e2e/test_prefetch.py::test_a_destination_that_is_killed_in_the_middle_begins_without",
        f"{SUITES}/e2e/test_prefetch.py::test_a_reset_in_the_middle_leaves_no_hit",
    ),
    "a frame on disk rots or cannot be read": (
        f"{SUITES}/e2e/test_disk_cache.py::test_blocks_that_rot_are_misses",
        f"{MANAGER}/ledger/test_transfer_records.py::test_a_fetch_that_fails_says_how",
    ),
    "a disk is full, fails or hangs": (
        f"{WORKER}/memory/test_disk_frames.py::test_a_full_disk_fails_a_save_and_the_frame_holds_nothing",
        f"{WORKER}/memory/test_disk_frames.py::test_eight_errors_in_a_row_close_the_tier_with_one_line",
        f"{WORKER}/engine/test_transfers.py::test_a_fetch_that_takes_half_a_second_is_given_up",
        f"{WORKER}/engine/test_transfers.py::test_a_disk_that_hangs_is_not_asked_until_all_that_it_was_late_with_has_come",
    ),
    "a worker with a disk cache is killed": (
        f"{SUITES}/e2e/test_disk_cache.py::test_a_worker_that_was_killed_finds_its_blocks_again",
        f"{WORKER}/memory/test_disk_frames.py::test_a_save_that_is_cut_short_is_a_miss",
    ),
    "files of another model, type or layout in the folder of a disk cache": (
        (f"{WORKER}/memory/test_disk_frames.py::test_another_format_empties_the_folder_and_the_log_names_what_differs"),
        f"{WORKER}/memory/test_disk_frames.py::test_a_second_process_is_refused",
    ),
    "a reset of the cache while a worker with a disk is away": (
        f"{SUITES}/e2e/test_disk_cache.py::test_a_worker_that_missed_a_reset_brings_nothing_back",
        f"{MANAGER}/test_pins.py::test_a_worker_that_missed_a_reset_is_reset_by_the_next_manager",
    ),
    "a rank of a worker ends or stands still": (
        f"{SUITES}/e2e/test_ranks.py::test_streams_outlive_each_rank",
        f"{WORKER}/plane/test_rank_group.py::test_a_rank_that_ends_while_steps_run_ends_the_worker_and_the_others",
        f"{WORKER}/plane/test_rank_watch.py::test_a_rank_that_stands_still_is_found_within_two_seconds",
    ),
    "a rank does not come, or differs": (
        f"{WORKER}/plane/test_rank_group.py::test_ranks_that_do_not_come_are_named",
        f"{WORKER}/plane/test_rank_group.py::test_each_difference_between_ranks_is_a_line",
    ),
    "another host of a worker's ranks, or the way to it, is lost": (
        f"{SUITES}/deployment/hosts/test_rank_hosts.py::test_streams_outlive_the_way_between_the_hosts",
        f"{WORKER}/plane/test_rank_hosts.py::test_a_rank_or_a_host_that_is_lost_ends_the_worker",
    ),
    "a step fails": (
        (
            f"{WORKER}/engine/test_engine.py::"
            "test_a_failed_step_ends_every_sequence_and_the_engine_serves_on_as_a_new_incarnation"
        ),
        f"{WORKER}/engine/test_engine.py::test_an_engine_whose_steps_all_fail_ends_behind_their_errors",
        (
            f"{WORKER}/runner/test_model_runner.py::"
            "test_a_step_that_cannot_be_laid_out_names_the_sequences_that_fail_alone_and_runs_nothing"
        ),
        f"{ROUTER}/test_lost_workers.py::test_a_failed_step_moves_the_sequence",
    ),
}

# What is promised elsewhere: in the guides, and for failures that have no row of their own.
PROMISES: dict[str, tuple[Kind | str, ...]] = {
    "a client goes on at another router, in Python by itself, over HTTP by the id of the last event": (
        Kind.ROUTER_KILLED,
        f"{SUITES}/e2e/test_resume.py::test_the_client_goes_on_by_itself",
        f"{SUITES}/e2e/test_resume.py::test_events_over_http_go_on_after_the_last_one",
        f"{ROUTER}/test_resuming.py::test_another_tenants_request_is_as_unknown_as_none",
        "tests/gpuworker/server/test_orphans.py::test_orphans_end_when_their_time_is_over_and_free_everything",
    ),
    "a standby takes over, and several managers divide a pool": (
        Kind.LEADER_KILLED,
        Kind.LEADER_FENCED,
        f"{SUITES}/e2e/test_standby.py::test_the_standby_takes_over_from_a_killed_leader_under_streams",
        f"{SUITES}/e2e/test_shards.py::test_a_killed_manager_concerns_its_own_worker_alone",
    ),
    "every service is restarted under load, and workers hand their streams over": (
        Kind.ALL_DRAINED,
        f"{SUITES}/e2e/test_rolling_restart.py::test_no_request_fails_and_no_token_is_wrong",
    ),
    "without a manager for good, streams end with the reason, and the router is not ready": (
        Kind.MANAGER_GONE,
        (
            f"{ROUTER}/test_lost_managers.py::"
            "test_a_stream_that_cannot_go_on_ends_with_the_reason_and_the_router_is_not_ready"
        ),
    ),
    "a worker that comes back elsewhere says where it is": (
        Kind.WORKER_MOVED,
        f"{WORKER}/engine/test_engine.py::test_each_session_begins_with_the_address_that_the_worker_has_then",
    ),
    "the end of a drain gives a reason": (f"{ROUTER}/test_adopting.py::test_the_end_of_a_drain_ends_it",),
    "a worker that cannot work says so once": (
        f"{WORKER}/test_process.py::test_what_cannot_work_is_said_once_and_before_torch_is_there",
    ),
    "a container's limit is its memory": (
        f"{WORKER}/memory/test_host_memory.py::test_a_containers_limit_is_its_memory",
    ),
    "all of it at random": (
        "tests/bench/test_soak.py::test_seconds_of_a_plan_break_no_stream_change_no_token_and_leave_no_block",
    ),
    "work that stands still, and a loop that lags": (
        f"{MANAGER}/ledger/test_watchdog.py::test_waiting_beside_free_blocks_with_nothing_running_is_a_stall",
        "tests/common/process/test_watchdog.py::test_a_blocked_loop_shows_as_lag",
        f"{SUITES}/deployment/operate/test_rules.py::test_an_alert_fires_when_it_should_and_no_other_does",
    ),
}


def failures() -> list[str]:
    """Return the first column of the table in ARCHITECTURE.md."""
    _, _, after = (ROOT / "ARCHITECTURE.md").read_text().partition("| failure | result |\n|---|---|\n")
    return re.findall(r"^\| (.+?) \|", after.partition("\n\n")[0], re.MULTILINE)


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_table_and_the_list_of_what_shows_it_have_the_same_rows() -> None:
    assert failures() == list(ROWS)


def test_every_kind_of_failure_that_is_injected_belongs_to_one_row() -> None:
    kinds = [each for shown in ROWS.values() for each in shown if isinstance(each, Kind)]
    assert sorted(kinds) == sorted(set(Kind) - {Kind.NONE})


@pytest.mark.parametrize("row", ROWS | PROMISES)
def test_what_shows_a_failure_exists(row: str) -> None:
    shown = (ROWS | PROMISES)[row]
    assert shown
    named = [each.split("::") for each in shown if not isinstance(each, Kind)]
    assert [name for path, name in named if name not in functions(path)] == []

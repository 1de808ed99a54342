"""The rules, by Prometheus' own tool: they parse, and each alert fires when it should and only then."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.contracts import errors
from common.process.metrics import metrics_port
from common.settings.config import flag_of
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.operate.alert_cases import CASES, UP, Case, Series
from tests.suites.deployment.operate.files import OPERATING, PROMETHEUS, ROOT, RUNBOOK, load_yaml, rules
from tests.suites.deployment.operate.promql import selectors

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def promtool(*words: str | Path) -> None:
    """Run promtool; fail with its output when it fails."""
    done = subprocess.run([str(PROMTOOL), *map(str, words)], capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted((PROMETHEUS / "rules").glob("*.yml")))


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_it_should_and_no_other_does(case: Case, tmp_path: Path) -> None:
    files = [str(each) for each in sorted((PROMETHEUS / "rules").glob("*.yml"))]
    tests = [_judged(case.fires, case, [case.alert]), _judged(case.quiet, case, [])]
    written = tmp_path / "case.yml"
    written.write_text(json.dumps({"rule_files": files, "evaluation_interval": case.every, "tests": tests}))
    promtool("test", "rules", written)


def _judged(series: Series, case: Case, firing: list[str]) -> dict[str, Any]:
    """Return a test in promtool's form (JSON is YAML): these alerts fire then, and no others."""
    laid = {name: values for name, values in {**UP, **series}.items() if values}
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    return {
        "interval": case.every,
        "input_series": [{"series": name, "values": values} for name, values in laid.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": case.at,
                "exp_samples": samples,
            }
        ],
    }


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {rule["alert"] for rule in rules("alert")}


def test_every_alert_says_how_urgent_it_is_what_is_wrong_and_where_to_read_on() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]


def test_the_runbook_has_a_section_for_every_alert_and_for_no_other() -> None:
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(), re.MULTILINE)
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules("alert")}
    page = RUNBOOK.relative_to(ROOT)
    assert urls == {alert: f"{page}#{alert.lower()}" for alert in urls}
    assert {heading for heading in headings if heading.startswith("Quire") and " " not in heading} == set(urls)


@pytest.mark.parametrize("page", [OPERATING, RUNBOOK], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/])docker/[\w./-]+", page.read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_options_that_the_runbook_names_exist() -> None:
    runbook = RUNBOOK.read_text().partition("## Alerts")[2]
    services = (RouterSettings, KvManagerSettings, GpuWorkerSettings)
    fields = [each for settings in services for each in settings.model_fields.items()]
    known = {flag_of(key) for key, _ in fields}
    known |= {f"--no-{flag_of(key)[2:]}" for key, field in fields if field.annotation is bool}
    named = set(re.findall(r"`(--[a-z-]+)", runbook))
    assert named
    assert named <= known


def test_reasons_that_count_as_failures_of_ours_are_errors_that_exist() -> None:
    known = {kind.reason for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "reason")}
    (ratio,) = [rule for rule in rules("record") if rule["record"] == "router:failures:ratio_5m"]
    wanted = [value for each in selectors(ratio["expr"]) for name, _, value in each.matchers if name == "reason"]
    assert wanted
    assert set(wanted[0].split("|")) <= known


def _services(compose_file: Path) -> set[str]:
    """Return the services of a file of Docker Compose, which has tags of its own."""
    plain = compose_file.read_text().replace(" !override", "")
    return set(yaml.safe_load(plain)["services"])


def test_what_is_scraped_are_the_services_of_the_stack_at_the_ports_that_they_have() -> None:
    """The names are compose's services; the ports are 1000 above those of gRPC, which the images name first."""
    files = (
        ROOT / "compose.yaml",
        *(ROOT / f"docker/{name}.compose.yaml" for name in ("standby", "shards", "prefill")),
    )
    services = {name for file in files for name in _services(file)}
    for job in load_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            assert set(found["names"]) <= services
            dockerfile = (ROOT / f"docker/{job['job_name']}.Dockerfile").read_text()
            (port,) = re.findall(r"^EXPOSE (\d+) \d+$", dockerfile, re.MULTILINE)
            assert found["port"] == metrics_port(None, int(port))

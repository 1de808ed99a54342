"""The commands of OPERATING.md for several hosts, run as they stand; engine and cluster only look at them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from tests.suites.deployment.docker.conftest import COMPOSE
from tests.suites.deployment.operate.files import OPERATING, ROOT
from tests.suites.deployment.operate.manifests import K8S, KUBECTL, Manifests, built

DOCKER = shutil.which("docker")
# `docker compose FILES up ...` becomes `docker-compose FILES config -q`, and `docker stack deploy FILES NAME` becomes
# `docker stack config FILES`: what both would start is read, and nothing is started.
ENGINE = f"""#!/usr/bin/env python3
import pathlib, subprocess, sys
words = sys.argv[1:]
with pathlib.Path(sys.argv[0]).with_name("asked").open("a") as asked:
    asked.write(" ".join(words) + "\\n")
verbs = [place for place, word in enumerate(words) if word in ("up", "cp", "deploy")]
before = words[1 : verbs[0]] if words[0] == "compose" else words[verbs[0] + 1 : -1]
command = ["{COMPOSE}", *before, "config", "-q"] if words[0] == "compose" else ["{DOCKER}", "stack", "config", *before]
sys.exit(subprocess.run(command, cwd="{ROOT}", stdout=subprocess.DEVNULL).returncode)
"""
CLUSTER = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/asked"
"""


def section(heading: str) -> str:
    """Return the text of a section, with its subsections."""
    _, found, rest = OPERATING.read_text().partition(f"\n## {heading}\n")
    assert found
    return rest.partition("\n## ")[0]


def blocks(heading: str, language: str = "") -> list[str]:
    """Return the blocks of code of a section that are in a language."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", section(heading), re.MULTILINE | re.DOTALL)
    return [dedent(text) for _, named, text in found if named == language]


def run(script: str, folder: Path, **programs: str) -> list[str]:
    """Run a block in `folder`, some programs replaced; return what these were asked. Fails when a command does."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "asked").read_text().splitlines()


def test_the_commands_for_hosts_of_workers_are_taken(tmp_path: Path) -> None:
    first, others = blocks("Workers on other hosts")
    asked = run(first + others, tmp_path, docker=ENGINE, sudo="#!/bin/sh\n")
    assert [line.split()[-4:] for line in asked] == [
        ["docker/hosts.compose.yaml", "up", "--build", "--detach"],
        ["docker/hosts.compose.yaml", "cp", "certs:/var/lib/quire/certs/worker", "certs-worker"],
        ["workers-4", "up", "--build", "--wait"],
    ]


@pytest.mark.skipif(DOCKER is None, reason="docker, whose client reads stack files, is not installed")
def test_the_commands_for_swarm_are_taken_and_make_what_the_stack_needs(tmp_path: Path) -> None:
    (script,) = blocks("Swarm")
    assert run(script, tmp_path, docker=ENGINE) == ["stack deploy -c docker/swarm.stack.yaml quire"]
    text = (ROOT / "docker/swarm.stack.yaml").read_text()
    needed = re.findall(r"file: \"\$\{SECRETS_DIR[^}]*\}/([\w/.-]+)\"", text)
    assert len(needed) == 12
    assert [name for name in needed if not (tmp_path / "secrets" / name).is_file()] == []


def made_secrets(asked: list[str], folder: Path) -> dict[str, set[str]]:
    """Return the keys of each secret that `kubectl create secret` would make of a folder."""
    made = {}
    for line in asked:
        if found := re.fullmatch(r"-n quire create secret generic (\S+) --from-file=(\S+)", line):
            made[found[1]] = {path.name for path in (folder / found[2]).iterdir()}
    return made


@pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")
def test_the_commands_for_kubernetes_make_every_secret_that_pods_need(tmp_path: Path) -> None:
    (script,) = blocks("Kubernetes")
    secrets = made_secrets(run(script, tmp_path, kubectl=CLUSTER), tmp_path)
    manifests = overlay(tmp_path)
    for _, pod, container in manifests.containers():
        mounted = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert mounted <= set(secrets)
        for each in container.get("env", []):
            if reference := each.get("valueFrom", {}).get("secretKeyRef"):
                assert reference["key"] in secrets[reference["name"]]
    tls = {name: keys for name, keys in secrets.items() if name.endswith("-tls")}
    assert set(map(frozenset, tls.values())) == {frozenset({"tls.crt", "tls.key", "ca.crt"})}
    assert secrets["quire-redis-users"] == {"users.acl"}


def overlay(folder: Path) -> Manifests:
    """Return what the overlay of the page builds; its folders are written as they are seen from `folder`."""
    (text,) = blocks("Kubernetes", "yaml")
    root = Path("../" * (len((folder / "overlay").resolve().relative_to("/").parts))) / K8S.relative_to("/")
    text = text.replace("../../components", f"{root}/components").replace("[../gpu]", f"[{root}/overlays/gpu]")
    (folder / "overlay").mkdir()
    (folder / "overlay/kustomization.yaml").write_text(text)
    return Manifests(built(folder / "overlay"))


@pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")
def test_the_overlay_of_the_page_builds_with_all_that_it_names(tmp_path: Path) -> None:
    manifests = overlay(tmp_path)
    (text,) = blocks("Kubernetes", "yaml")
    wanted = {f"{each['newName']}:{each['newTag']}" for each in yaml.safe_load(text)["images"]}
    images = {container["image"] for name, _, container in manifests.containers() if name != "redis"}
    assert images == wanted
    assert manifests.one("StatefulSet", "kvmanager")["spec"]["replicas"] == 2
    assert {each["metadata"]["name"] for each in manifests.of("HorizontalPodAutoscaler")} == {"router", "gpuworker"}
    assert len(manifests.of("PodMonitor")) == len(manifests.of("PrometheusRule")) == 1


def test_each_component_of_kubernetes_is_on_the_page_and_no_other() -> None:
    named = re.findall(r"^\| `([\w-]+)` \|", section("Kubernetes"), re.MULTILINE)
    assert set(named) == {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}


def test_the_table_of_autoscaling_has_the_values_that_the_adapter_serves() -> None:
    served = yaml.safe_load((ROOT / "docker/observability/prometheus/adapter.yml").read_text())["externalRules"]
    named = re.findall(r"\| `(\w+:\w+:\w+)` \|", section("Kubernetes"))
    assert named == [rule["seriesQuery"] for rule in served]

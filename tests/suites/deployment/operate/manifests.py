"""The Kubernetes manifests as the cluster would get them: built by kubectl, and looked up by kind and name."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.suites.deployment.operate.files import DOCKER

K8S: Final = DOCKER / "k8s"
VARIANTS: Final = ("base", "overlays/demo", "overlays/gpu")
SERVICES: Final = ("router", "kvmanager", "gpuworker")
KUBECTL: Final = shutil.which("kubectl")

Manifest = dict[str, Any]


def built(folder: Path) -> str:
    """Return what `kubectl kustomize` makes of a folder; fail with its words when it refuses."""
    command = [str(KUBECTL), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Manifests:
    """Everything that one variant creates."""

    def __init__(self, text: str) -> None:
        self.all: list[Manifest] = list(yaml.safe_load_all(text))

    def of(self, kind: str) -> list[Manifest]:
        """Return all of a kind."""
        return [each for each in self.all if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        """Return the one with a name."""
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        return found

    def pods(self) -> dict[str, Manifest]:
        """Return the pod template of each deployment and stateful set, and both of a leader with its workers."""
        owners = [*self.of("Deployment"), *self.of("StatefulSet")]
        found = {each["metadata"]["name"]: each["spec"]["template"] for each in owners}
        for each in self.of("LeaderWorkerSet"):
            name, group = each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]
            found |= {name: group["leaderTemplate"], f"{name}-follower": group["workerTemplate"]}
        return found

    def containers(self) -> Iterator[tuple[str, Manifest, Manifest]]:
        """Yield name, pod specification and container of each deployment and stateful set; each has one."""
        for name, pod in self.pods().items():
            (container,) = pod["spec"]["containers"]
            yield name, pod["spec"], container

    def environment(self, name: str, before: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that the container of these pods gets, fields of its pod filled in.

        `before` come first: those that a controller adds.
        """
        (container,) = self.pods()[name]["spec"]["containers"]
        variables = dict(before or {})
        for source in container.get("envFrom", []):
            variables |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        for each in container.get("env", []):
            variables[each["name"]] = _filled(each.get("value") or _found_by(each["valueFrom"]), variables)
        return variables


def _found_by(source: Mapping[str, Any]) -> str:
    """Return what a variable has from its pod, or from a secret as `common.process.redis_users` makes it."""
    if "fieldRef" in source:
        return f"the-{source['fieldRef']['fieldPath']}"
    user = source["secretKeyRef"]["name"].removeprefix("quire-redis-")
    return {"redis-url": f"redis://{user}:password@redis:6379/0", "pool-key": "k" * 64}[source["secretKeyRef"]["key"]]


def _filled(value: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], value)


@cache
def variant(name: str) -> Manifests:
    """Return a variant, built once."""
    return Manifests(built(K8S / name))


def with_components(folder: Path, *names: str) -> Manifests:
    """Return the base with components, by a kustomization in `folder`. kubectl takes no absolute path in one."""
    root = Path("../" * len(folder.resolve().relative_to("/").parts)) / K8S.relative_to("/")
    components = ", ".join(f"{root}/components/{name}" for name in names)
    text = f"resources: [{root}/base]\ncomponents: [{components}]\nnamespace: quire\n"
    (folder / "kustomization.yaml").write_text(text)
    return Manifests(built(folder))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes something with these labels."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []) if _is_in(each)
    )


def _is_in(expression: Mapping[str, Any]) -> bool:
    assert expression["operator"] == "In", "this reader knows no other operator"
    return True

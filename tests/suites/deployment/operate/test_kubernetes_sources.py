"""The Kubernetes manifests as they are written: what can be checked where there is no kubectl to build them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.rpc.roles import Role, dns_name
from tests.suites.deployment.operate.files import PROMETHEUS, load_yaml
from tests.suites.deployment.operate.manifests import K8S

CERT_MANAGER = K8S / "components" / "cert-manager"
# What other programs define; test_kubernetes_scaling.py and test_kubernetes_monitoring.py look at theirs.
FOREIGN = {"cert-manager.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1", "leaderworkerset.x-k8s.io/v1"}
# How kustomize builds, which no cluster gets.
FOR_KUSTOMIZE = ("kustomization.yaml", "references.yaml")
# Parts of overlays are patches, which are not manifests by themselves.
WHOLE = [
    path
    for path in sorted(K8S.glob("**/*.yaml"))
    if path.name not in FOR_KUSTOMIZE and (path.parent.name != "gpu" or path.name == "model.yaml")
]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: str(path.relative_to(K8S)))
def test_a_file_holds_valid_manifests(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for each in documents:
        if each["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(each, "1.30", strict=True)


def test_cert_manager_gets_its_own_kinds_and_one_certificate_for_each_role() -> None:
    documents = [
        document
        for path in CERT_MANAGER.glob("*.yaml")
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]
    assert {each["apiVersion"] for each in documents} == {"cert-manager.io/v1"}
    issuers = {each["metadata"]["name"] for each in documents if each["kind"] == "Issuer"}
    certificates = [each["spec"] for each in documents if each["kind"] == "Certificate"]
    assert len(issuers) + len(certificates) == len(documents)
    assert {each["issuerRef"]["name"] for each in certificates} == issuers
    leaves = {each["secretName"]: each["dnsNames"] for each in certificates if not each.get("isCA")}
    assert leaves == {f"quire-{role}-tls": [dns_name(role)] for role in Role}


def test_every_file_is_named_in_its_kustomization() -> None:
    for kustomization in K8S.glob("**/kustomization.yaml"):
        parts = load_yaml(kustomization)
        named = {
            *parts.get("resources", ()),
            *parts.get("configurations", ()),
            *(patch.get("path") for patch in parts.get("patches", ())),
        }
        files = {path.name for path in kustomization.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert files <= named, kustomization


def test_prometheus_in_a_cluster_goes_by_what_pods_carry() -> None:
    """Prometheus writes a name's dots, slashes and dashes as underscores."""
    deployments: list[dict[str, Any]] = [
        document
        for path in WHOLE
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] == "Deployment" and document["metadata"]["name"] != "redis"
    ]
    assert len(deployments) == 4
    (job,) = load_yaml(PROMETHEUS / "kubernetes.yml")["scrape_configs"]
    rules = {source for rule in job["relabel_configs"] for source in rule["source_labels"]}
    for deployment in deployments:
        pod = deployment["spec"]["template"]
        carried = {f"__meta_kubernetes_pod_annotation_{_written(name)}" for name in pod["metadata"]["annotations"]}
        labels = pod["metadata"]["labels"].keys() - {"quire.dev/disaggregation"}  # it tells two kinds of workers apart
        carried |= {f"__meta_kubernetes_pod_label_{_written(name)}" for name in labels}
        assert {rule for rule in rules if "annotation" in rule or "label" in rule} == carried
        assert "grpc" in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]


def _written(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)

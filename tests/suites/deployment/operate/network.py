"""The connections that NetworkPolicies allow, by the rules of Kubernetes: policies add up, and both ends must allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.suites.deployment.operate.manifests import Manifest, selects

NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    """One end of a connection: a name for the test, its labels, those of its namespace."""

    name: str
    labels: Mapping[str, str]
    namespace: Mapping[str, str]
    # Whether Quire's policies apply to the pod. Other pods may send and take anything: their policies are unknown.
    ours: bool = False


def edges(policies: list[Manifest], pods: list[Pod], ports: set[int]) -> Iterator[tuple[str, str, int]]:
    """Yield (who, to whom, port) of everything that may be sent over TCP between two pods of which one is ours."""
    for sender in pods:
        for taker in pods:
            for port in ports if sender is not taker and (sender.ours or taker.ours) else ():
                if _may(policies, "Egress", sender, taker, port) and _may(policies, "Ingress", taker, sender, port):
                    yield sender.name, taker.name, port


def _may(policies: list[Manifest], direction: str, pod: Pod, other: Pod, port: int) -> bool:
    """Whether a pod's own policies let it send to (or take from) another at a port."""
    if not pod.ours:
        return True
    mine = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    if not mine:
        return True
    side = "to" if direction == "Egress" else "from"
    return any(
        _has(rule["ports"], port) and any(_is(peer, pod, other) for peer in rule[side])
        for policy in mine
        for rule in policy.get(direction.lower(), [])
    )


def _has(ports: list[dict[str, Any]], port: int) -> bool:
    return any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports if each["protocol"] == "TCP")


def _is(peer: Mapping[str, Any], pod: Pod, other: Pod) -> bool:
    """Whether a peer of a rule of `pod` is `other`; without a namespace selector it means the pod's own namespace."""
    assert set(peer) <= {"podSelector", "namespaceSelector"}, "this reader knows no other kind of peer"
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], other.namespace):
            return False
    elif other.namespace != pod.namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)

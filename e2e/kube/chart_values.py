"""Values of the chart that tests render it with."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

EVERYTHING = {
    "replicas": 3,
    "image": {
        "repository": "registry.example/sluice-operator",
        "digest": "sha256:" + "0" * 64,
        "pullSecrets": ["pull"],
    },
    "engineImage": "registry.example/engine:1",
    "routerImage": "registry.example/router:1",
    "gpuResourceName": "amd.com/gpu",
    "watchAllNamespaces": True,
    "watchNodes": True,
    "allowHostAccess": True,
    "tls": {"mode": "CertManager", "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}},
    "maxConcurrentUpgrades": 3,
    "workers": 32,
    "resyncSeconds": 86400,
    "requestTimeoutSeconds": 2,
    "logLevel": "DEBUG",
    "serviceAccount": {"annotations": {"example.org/role": "a"}},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"example.org/note": "b"},
    "podLabels": {"example.org/team": "serving"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    "networkPolicy": {"enabled": True, "egress": {"enabled": True, "apiServerCIDRs": ["10.0.0.1/32"]}},
    "serviceMonitor": {"enabled": True, "intervalSeconds": 7, "labels": {"release": "monitors"}},
    "prometheusRule": {
        "enabled": True,
        "labels": {"release": "rules"},
        "attainmentPercent": 95,
        "runbookUrl": "https://example.org/runbook.md",
    },
    "clusterMonitors": {"enabled": False, "labels": {"release": "prometheus", "example.org/team": "a"}},
    "dashboard": {"enabled": True, "labels": {"grafana_dashboard": "2"}},
}
LEAST = {
    "replicas": 1,
    "crds": {"install": False},
    "rbac": {"create": False, "aggregate": False},
    "serviceAccount": {"create": False, "name": "default"},
    "resources": {"requests": None, "limits": None},
    "networkPolicy": {"enabled": False},
}
NARROW = {"watchNamespaces": ["team-a", "team-b"]}
VALUES = {"defaults": {}, "everything": EVERYTHING, "least": LEAST, "narrow": NARROW}

"""KEDA and prometheus-adapter, built from their Go modules, in pods that their own manifests describe.

KEDA has seventy kinds of triggers, most of them with the client of a cloud or of a database. Its two programs are built
with one kind, Prometheus: from 1,960 packages in place of 3,710. Nothing else in them is changed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from testbed.go_modules import fetch_module
from testbed.images import Image
from testbed.kubernetes_build import build_once, compile_program
from testbed.settings import find_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.cluster import Testbed

Object = dict[str, Any]

KEDA = ("github.com/kedacore/keda/v2", "v2.21.0", "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=")
ADAPTER = ("sigs.k8s.io/prometheus-adapter", "v0.12.0", "h1:e29A6BIwA/NKxPZeuamBMHJsvz0sSUXTb92Obg7RMV4=")
# Files of KEDA's folder of triggers that stay, and the only case of its choice among them.
KEPT_TRIGGERS = ("prometheus_scaler.go", "cpu_memory_scaler.go", "scaler.go")
CHOICE = """
	if triggerType == "prometheus" {
		return scalers.NewPrometheusScaler(config)
	}
	return nil, fmt.Errorf("no scaler found for type: %s", triggerType)
"""
# A constant of all triggers, which is declared beside one of those that go.
DECLARED_ELSEWHERE = 'package scalers\n\nconst externalMetricType = "External"\n'
# prometheus-adapter's own manifests, without those for the metrics of `kubectl top`.
ADAPTER_MANIFESTS = (
    "service-account",
    "cluster-role",
    "cluster-role-binding",
    "cluster-role-binding-delegator",
    "role-binding-auth-reader",
    "service",
    "deployment",
    "config-map",
    "api-service",
)
EXTERNAL_METRICS = "v1beta1.external.metrics.k8s.io"
PATIENCE = "--timeout=240s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaler:
    """A program, or several, that give an HPA external metrics.

    Args:
        namespace: Its namespace.
        manifests: Everything that it is made of.
        programs: By its Deployment, the path of a program in its image, and the program.
    """

    namespace: str
    manifests: list[Object]
    programs: dict[str, tuple[str, Path]]


def build_autoscalers() -> Path:
    """Builds KEDA and prometheus-adapter, unless they are cached; returns the folder.

    Raises:
        MissingError: There is no Go, or it is too old.
        TestbedError: A build failed.
    """
    return build_once("KEDA and prometheus-adapter", find_cache("autoscalers"), [Path(__file__)], _build_into)


def _build_into(folder: Path, go: str) -> None:
    keda, adapter = (fetch_module(go, f"{name}@{version}", checksum) for name, version, checksum in (KEDA, ADAPTER))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "built"
        # Go's module cache is read-only, and so would be a copy with its modes.
        shutil.copytree(keda, source, copy_function=shutil.copyfile)
        for path in (source, *source.rglob("*/")):
            path.chmod(0o755)
        _leave_one_trigger(source)
        stamps = {f"{KEDA[0]}/version.Version": KEDA[1].removeprefix("v")}
        for name in ("operator", "adapter"):
            compile_program(go, source, f"./cmd/{name}", target / f"keda-{name}", stamps)
        compile_program(go, adapter, "./cmd/adapter", target / "adapter", {})
        shutil.copytree(source / "config", target / "keda")
        shutil.copytree(adapter / "deploy" / "manifests", target / "manifests")
        target.rename(folder)  # whole or not at all


def _leave_one_trigger(source: Path) -> None:
    """Removes every trigger but Prometheus from KEDA's sources."""
    triggers = source / "pkg" / "scalers"
    for path in triggers.glob("*.go"):
        if path.name not in KEPT_TRIGGERS:
            path.unlink()
    (triggers / "shared.go").write_text(DECLARED_ELSEWHERE)
    builder = source / "pkg" / "scaling" / "scalers_builder.go"
    before, _, rest = builder.read_text().partition("// TRIGGERS-START")
    builder.write_text(before + CHOICE + rest.partition("// TRIGGERS-END")[2])


def make_keda(testbed: Testbed) -> Autoscaler:
    """Makes KEDA as its own manifests install it, without its admission webhooks."""
    folder = build_autoscalers()
    text = testbed.client.kubectl("kustomize", str(folder / "keda" / "minimal"))
    return Autoscaler(
        namespace="keda",
        manifests=list(yaml.safe_load_all(text)),
        programs={
            "keda-operator": ("/keda", folder / "keda-operator"),
            "keda-metrics-apiserver": ("/keda-adapter", folder / "keda-adapter"),
        },
    )


def make_adapter(rules: str, url: str) -> Autoscaler:
    """Makes prometheus-adapter as its own manifests install it, for external metrics.

    Args:
        rules: Its configuration.
        url: Prometheus' URL in the cluster.
    """
    folder = build_autoscalers()
    texts = [(folder / "manifests" / f"{name}.yaml").read_text() for name in ADAPTER_MANIFESTS]
    *manifests, deployment, configuration, service = map(yaml.safe_load, texts)
    deployment["spec"]["replicas"] = 1
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    # It learns of new series once a minute by default.
    settings = {"--prometheus-url": url, "--metrics-relist-interval": "5s"}
    own = [argument for argument in container["args"] if argument.partition("=")[0] not in settings]
    container["args"] = own + [f"{name}={value}" for name, value in settings.items()]
    configuration["data"]["config.yaml"] = rules
    service["metadata"]["name"] = EXTERNAL_METRICS
    service["spec"]["group"] = EXTERNAL_METRICS.partition(".")[2]
    return Autoscaler(
        namespace="monitoring",
        manifests=[*manifests, configuration, deployment, service],
        programs={"prometheus-adapter": ("/adapter", folder / "adapter")},
    )


@contextlib.contextmanager
def run_autoscaler(testbed: Testbed, autoscaler: Autoscaler) -> Iterator[None]:
    """Runs an autoscaler in pods; the block begins when it answers for external metrics."""
    client, namespace = testbed.client, autoscaler.namespace
    for item in autoscaler.manifests:
        if item["kind"] == "Deployment":
            _load_image(testbed, item, *autoscaler.programs[item["metadata"]["name"]])
    manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": autoscaler.manifests})
    try:
        # Some of KEDA's definitions are larger than the annotation of a client-side apply may be.
        client.kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
        for name in autoscaler.programs:
            client.kubectl("rollout", "status", "-n", namespace, f"deployment/{name}", PATIENCE)
        client.kubectl("wait", "--for=condition=Available", f"apiservice/{EXTERNAL_METRICS}", PATIENCE)
        yield
    except BaseException:
        print(client.kubectl("get", "pods,events", "-n", namespace))
        for name in autoscaler.programs:
            print(client.kubectl("logs", "--tail=60", "--ignore-errors", "-n", namespace, f"deployment/{name}"))
        raise
    finally:
        # A ScaledObject that a failed test leaves behind would have the deletion wait for KEDA, which is gone.
        client.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=manifests)


def _load_image(testbed: Testbed, deployment: Object, inside: str, program: Path) -> None:
    """Loads the image of a Deployment onto the node, and forbids to pull it."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["imagePullPolicy"] = "Never"
    testbed.node.load_image(Image(name=container["image"], command=(inside,), files={inside: program}))

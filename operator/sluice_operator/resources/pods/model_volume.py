"""The model's files in a pod: read-only at /model, wherever they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api.model_identity import identify_model, name_revision_key, needs_resolution

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.model_spec import CaBundle, HuggingFaceSource, ModelSpec
    from sluice_operator.kubernetes.objects import Object

MODEL_DIRECTORY = "/model"
VOLUME = "model"
FETCH_MODEL = "fetch-model"
# Asks the Hub which commit a branch, a tag or no revision is. The operator stores the first answer, for all pods.
RESOLVE_MODEL = "resolve-model"
REVISION_VARIABLE = "SLUICE_MODEL_REVISION"
# The termination message is how a container tells the operator something without rights of its own. What is stored
# already is said again, so that a pod that starts later needs no answer of the Hub.
RESOLVE_PROGRAM = f"""\
import os, pathlib, sys
revision = os.environ.get("{REVISION_VARIABLE}")
if not revision:
    from huggingface_hub import HfApi
    revision = HfApi().model_info(sys.argv[1], revision=sys.argv[2] or None).sha
pathlib.Path("/dev/termination-log").write_text(revision)
"""
# Weights take minutes and disk, config.json neither: what the engine would refuse by it is not fetched, and the engine,
# which starts all the same, says why. An image without the check ends it with another status, and gets everything.
FETCH_PROGRAM = """\
import os, subprocess, sys
model, revision, *vllm_arguments = sys.argv[1:]
fetch = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", model, "--local-dir", "/model"]
fetch += ["--revision", revision]
if status := subprocess.run([*fetch, "--include", "config.json"]).returncode:
    sys.exit(status)
check = [sys.executable, "-m", "sluice_engine.startup.model_check", "/model", *vllm_arguments]
if subprocess.run(check).returncode == 7:
    print("the weights of a model that is refused are not fetched", file=sys.stderr)
    sys.exit()
os.execv(sys.executable, fetch)
"""
CA_VOLUME = "ca-bundle"
CA_DIRECTORY = "/etc/sluice/ca"
CA_FILE = "ca.crt"
# What routers read: tokenizer, chat template, configuration; never weights.
ROUTER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMount:
    """How a pod gets the model.

    Args:
        volumes: The model's volume, and what fetching it needs.
        mount: Where the main container sees it.
        init_containers: What fetches it first, as containers without security context and image.
        variables: Environment of the main container that the mount refers to.
    """

    volumes: tuple[Object, ...]
    mount: Object
    init_containers: tuple[Object, ...] = ()
    variables: tuple[Object, ...] = ()


def mount_model(
    model: ModelSpec, plan_name: str, *, files: tuple[str, ...] = (), vllm_arguments: tuple[str, ...] = ()
) -> ModelMount:
    """Mounts the model.

    Args:
        model: The model and its source.
        plan_name: ConfigMap in which the operator keeps the revision of a model that names none.
        files: Patterns of the files that are needed; all when empty, unless an engine would refuse the model. Sources
            that fetch nothing give all.
        vllm_arguments: The engine's, which may change what it refuses.
    """
    source = model.source
    if source.persistent_volume_claim:
        claim = source.persistent_volume_claim
        volume: Object = {"persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
        return _mount(volume, claim.path)
    if source.image:
        # Read-only by nature; the kubelet pulls it as it pulls any image.
        return _mount({"image": {"reference": source.image.reference}}, source.image.path)
    assert source.hugging_face is not None, "exactly one source is given (api/cross_field_rules.py)"
    return _fetch(model, source.hugging_face, plan_name, files, vllm_arguments)


def _mount(volume: Object, path: str) -> ModelMount:
    return ModelMount(volumes=({"name": VOLUME, **volume},), mount=_describe_mount(path, is_read_only=True))


def _describe_mount(path: str, *, is_read_only: bool, has_variables: bool = False) -> Object:
    mount: Object = {"name": VOLUME, "mountPath": MODEL_DIRECTORY}
    if is_read_only:
        mount["readOnly"] = True
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if parts:
        mount["subPathExpr" if has_variables else "subPath"] = "/".join(parts)
    return mount


def _fetch(
    model: ModelSpec,
    source: HuggingFaceSource,
    plan_name: str,
    files: tuple[str, ...],
    vllm_arguments: tuple[str, ...],
) -> ModelMount:
    """Init containers download into a volume; what is there already is only checked."""
    is_unpinned = needs_resolution(model)
    revision = f"$({REVISION_VARIABLE})" if is_unpinned else str(model.revision)
    environment: list[Object] = [{"name": "HF_HOME", "value": "/tmp/huggingface"}]  # noqa: S108 - its emptyDir
    if source.token_secret_ref:
        reference = {"name": source.token_secret_ref.name, "key": source.token_secret_ref.key}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    environment += [{"name": name, "value": value} for name, value in render_fetch_environment(source).items()]
    volume: Object = {"emptyDir": {}}
    path = "."
    if source.cache_claim_name:
        volume = {"persistentVolumeClaim": {"claimName": source.cache_claim_name}}
        # One folder per model, revision and set of files, so that clusters may share the claim.
        path = "--".join([*model.name.split("/"), revision, *(["tokenizer"] if files else [])])
    tmp: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108
    mounts = [_describe_mount(path, is_read_only=False, has_variables=is_unpinned), tmp]
    volumes: tuple[Object, ...] = ({"name": VOLUME, **volume},)
    if source.ca_bundle:
        mounts.append({"name": CA_VOLUME, "mountPath": CA_DIRECTORY, "readOnly": True})
        volumes += (_render_ca_volume(source.ca_bundle),)
    known = [_refer_to_revision(model, plan_name)] if is_unpinned else []
    fetch = {
        "name": FETCH_MODEL,
        "command": _render_fetch_command(model.name, revision, files, vllm_arguments),
        "env": [*known, *environment],
        "volumeMounts": mounts,
    }
    resolve = []
    if is_unpinned:
        optional = [_refer_to_revision(model, plan_name, is_optional=True)]
        command = ["python", "-c", RESOLVE_PROGRAM, model.name, model.revision or ""]
        others = [mount for mount in mounts if mount["name"] != VOLUME]
        resolve = [
            {"name": RESOLVE_MODEL, "command": command, "env": [*optional, *environment], "volumeMounts": others}
        ]
    return ModelMount(
        volumes=volumes,
        mount=_describe_mount(path, is_read_only=True, has_variables=is_unpinned),
        init_containers=(*resolve, fetch),
        variables=tuple(known) if source.cache_claim_name else (),
    )


def _render_fetch_command(
    name: str, revision: str, files: tuple[str, ...], vllm_arguments: tuple[str, ...]
) -> list[str]:
    if not files:
        return ["python", "-c", FETCH_PROGRAM, name, revision, *vllm_arguments]
    download = ["python", "-m", "huggingface_hub.cli.hf", "download", name, "--local-dir", MODEL_DIRECTORY]
    return [*download, "--revision", revision, *(part for pattern in files for part in ("--include", pattern))]


def _refer_to_revision(model: ModelSpec, plan_name: str, *, is_optional: bool = False) -> Object:
    """A variable with the revision that is stored; a container that requires it starts once there is one."""
    reference: Object = {"name": plan_name, "key": name_revision_key(identify_model(model))}
    if is_optional:
        reference["optional"] = True
    return {"name": REVISION_VARIABLE, "valueFrom": {"configMapKeyRef": reference}}


def render_fetch_environment(source: HuggingFaceSource) -> dict[str, str]:
    """Renders how the Hub is reached. Only the init container has these: servers speak with pods of the cluster only.

    Returns:
        Variables as huggingface_hub and its HTTP client read them.
    """
    given: dict[str, str | None] = {"HF_ENDPOINT": source.endpoint}
    if source.proxy:
        given |= {
            "HTTP_PROXY": source.proxy.http_proxy,
            "HTTPS_PROXY": source.proxy.https_proxy,
            "NO_PROXY": ",".join(source.proxy.no_proxy),
        }
    if source.ca_bundle:
        # Xet, the Hub's other way to transfer files, has a TLS library of its own.
        given |= {"SSL_CERT_FILE": f"{CA_DIRECTORY}/{CA_FILE}", "HF_HUB_DISABLE_XET": "1"}
    return {name: value for name, value in given.items() if value}


def _render_ca_volume(bundle: CaBundle) -> Object:
    reference = bundle.config_map_key_ref or bundle.secret_key_ref
    assert reference is not None, "exactly one is given (api/cross_field_rules.py)"
    items = [{"key": reference.key, "path": CA_FILE}]
    if bundle.config_map_key_ref:
        return {"name": CA_VOLUME, "configMap": {"name": reference.name, "items": items}}
    return {"name": CA_VOLUME, "secret": {"secretName": reference.name, "items": items}}

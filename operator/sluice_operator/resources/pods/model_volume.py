"""The model's files in a pod: read-only at /model, wherever they come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_operator.api.model_identity import identify_model, name_revision_key, needs_resolution
from sluice_operator.resources.pods import object_storage_fetch
from sluice_operator.resources.pods.object_storage_fetch import REVISION_VARIABLE

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.model_spec import (
        CaBundle,
        HuggingFaceSource,
        ModelSpec,
        ObjectStorageSource,
    )
    from sluice_operator.kubernetes.objects import Object

MODEL_DIRECTORY = "/model"
VOLUME = "model"
FETCH_MODEL = "fetch-model"
# Asks the Hub which commit a branch, a tag or no revision is, or object storage what it has. The operator stores the
# first answer, for all pods.
RESOLVE_MODEL = "resolve-model"
# The termination message is how a container tells the operator something without rights of its own.
TERMINATION_LOG = "/dev/termination-log"
# What is stored already is said again, so that a pod that starts later needs no answer of the Hub.
RESOLVE_PROGRAM = f"""\
import os, pathlib, sys
revision = os.environ.get("{REVISION_VARIABLE}")
if not revision:
    from huggingface_hub import HfApi
    revision = HfApi().model_info(sys.argv[1], revision=sys.argv[2] or None).sha
pathlib.Path("{TERMINATION_LOG}").write_text(revision)
"""
# Weights take minutes and disk, config.json neither: what the engine would refuse by it is not fetched, and the engine,
# which starts all the same, says why. An image without the check ends it with another status, and gets everything.
# Its arguments: what fetches config.json, what fetches everything, and the engine's of vLLM, with -- between them.
FETCH_PROGRAM = """\
import os, subprocess, sys
first = sys.argv.index("--")
second = sys.argv.index("--", first + 1)
if status := subprocess.run(sys.argv[1:first]).returncode:
    sys.exit(status)
check = [sys.executable, "-m", "sluice_engine.startup.model_check", "/model", *sys.argv[second + 1 :]]
if subprocess.run(check).returncode == 7:
    print("the weights of a model that is refused are not fetched", file=sys.stderr)
    sys.exit()
os.execvp(sys.argv[first + 1], sys.argv[first + 1 : second])
"""
# The image of the pod has it: images install one wheel.
STORAGE_PROGRAM = ("python", "-m", object_storage_fetch.__name__)
CA_VOLUME = "ca-bundle"
CA_DIRECTORY = "/etc/sluice/ca"
CA_FILE = "ca.crt"
# Object storage compares whole names, so that the pattern has to allow for folders before it.
CONFIG_FILES = "*config.json"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """How init containers fetch a model.

    Args:
        resolve: Command that says which revision there is.
        download: Command that fetches all files of a revision.
        pattern_option: What stands before each pattern, if ``download`` is to fetch some of the files.
        environment: Variables of both.
        others: More fields of both, such as envFrom.
        volumes: Volumes of both, beside the model's.
        mounts: Where they are mounted.
        cache_claim_name: Claim that keeps what was fetched.
    """

    resolve: tuple[str, ...]
    download: tuple[str, ...]
    environment: tuple[Object, ...]
    pattern_option: tuple[str, ...] = ()
    others: Object = field(default_factory=dict)
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    cache_claim_name: str | None = None

    def render_download(self, files: tuple[str, ...], vllm_arguments: tuple[str, ...]) -> list[str]:
        """Renders the command that fetches; arguments as ``mount_model``."""
        if files:
            return self._select(files)
        first = self._select((CONFIG_FILES,))
        return ["python", "-c", FETCH_PROGRAM, *first, "--", *self.download, "--", *vllm_arguments]

    def _select(self, patterns: tuple[str, ...]) -> list[str]:
        return [*self.download, *(part for pattern in patterns for part in (*self.pattern_option, pattern))]


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
    revision = f"$({REVISION_VARIABLE})" if needs_resolution(model) else str(model.revision)
    if source.object_storage:
        fetch = _fetch_from_storage(source.object_storage, revision)
    else:
        assert source.hugging_face is not None, "exactly one source is given (api/cross_field_rules.py)"
        fetch = _fetch_from_hub(model, source.hugging_face, revision)
    # One folder per model, revision and set of files, so that clusters may share the claim.
    folder = "--".join([*model.name.split("/"), revision, *(["tokenizer"] if files else [])])
    download = fetch.render_download(files, vllm_arguments)
    return _mount_fetched(model, fetch, plan_name, folder, download)


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


def _fetch_from_hub(model: ModelSpec, source: HuggingFaceSource, revision: str) -> Fetch:
    environment: list[Object] = [{"name": "HF_HOME", "value": "/tmp/huggingface"}]  # noqa: S108 - its emptyDir
    if source.token_secret_ref:
        reference = {"name": source.token_secret_ref.name, "key": source.token_secret_ref.key}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    environment += [{"name": name, "value": value} for name, value in render_fetch_environment(source).items()]
    download = ("python", "-m", "huggingface_hub.cli.hf", "download", model.name, "--local-dir", MODEL_DIRECTORY)
    fetch = Fetch(
        resolve=("python", "-c", RESOLVE_PROGRAM, model.name, model.revision or ""),
        download=(*download, "--revision", revision),
        pattern_option=("--include",),
        environment=tuple(environment),
        cache_claim_name=source.cache_claim_name,
    )
    if source.ca_bundle:
        mount: Object = {"name": CA_VOLUME, "mountPath": CA_DIRECTORY, "readOnly": True}
        return replace(fetch, mounts=(mount,), volumes=(_render_ca_volume(source.ca_bundle),))
    return fetch


def _fetch_from_storage(source: ObjectStorageSource, revision: str) -> Fetch:
    variables = {}
    if source.endpoint:
        # Stores other than the clouds' own have no host name for each bucket.
        of_s3 = {"AWS_ENDPOINT_URL": source.endpoint, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
        variables = of_s3 if source.uri.startswith("s3:") else {"STORAGE_EMULATOR_HOST": source.endpoint}
    secret = {"envFrom": [{"secretRef": {"name": source.secret_name}}]} if source.secret_name else {}
    return Fetch(
        resolve=(*STORAGE_PROGRAM, "resolve", source.uri, TERMINATION_LOG),
        download=(*STORAGE_PROGRAM, "fetch", source.uri, revision, MODEL_DIRECTORY),
        environment=tuple({"name": name, "value": value} for name, value in variables.items()),
        others=secret,
        cache_claim_name=source.cache_claim_name,
    )


def _mount_fetched(model: ModelSpec, fetch: Fetch, plan_name: str, folder: str, download: list[str]) -> ModelMount:
    """Init containers download into a volume; what is there already is only checked."""
    is_unpinned = needs_resolution(model)
    volume: Object = {"emptyDir": {}}
    path = "."
    if fetch.cache_claim_name:
        volume, path = {"persistentVolumeClaim": {"claimName": fetch.cache_claim_name}}, folder
    tmp: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108
    mount = _describe_mount(path, is_read_only=False, has_variables=is_unpinned)
    known = [_refer_to_revision(model, plan_name)] if is_unpinned else []
    container = {
        "name": FETCH_MODEL,
        "command": download,
        "env": [*known, *fetch.environment],
        "volumeMounts": [mount, tmp, *fetch.mounts],
        **fetch.others,
    }
    resolve = []
    if is_unpinned:
        optional = _refer_to_revision(model, plan_name, is_optional=True)
        resolve = [
            {
                "name": RESOLVE_MODEL,
                "command": [*fetch.resolve],
                "env": [optional, *fetch.environment],
                "volumeMounts": [tmp, *fetch.mounts],
                **fetch.others,
            }
        ]
    return ModelMount(
        volumes=({"name": VOLUME, **volume}, *fetch.volumes),
        mount=_describe_mount(path, is_read_only=True, has_variables=is_unpinned),
        init_containers=(*resolve, container),
        variables=tuple(known) if fetch.cache_claim_name else (),
    )


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

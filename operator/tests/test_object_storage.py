"""Models in S3 and Google Cloud Storage: init containers fetch one revision, with vLLM's own streamer."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import boto3
import pytest
from children_harness import engine_template, router_template
from moto.server import ThreadedMotoServer

from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec, ObjectStorageSource
from sluice_operator.api.model_identity import COMMIT, identify_model
from sluice_operator.resources.pods.model_volume import CONFIG_FILES
from sluice_operator.resources.pods.object_storage_fetch import FETCHED, FetchError, fetch, find_revision

if TYPE_CHECKING:
    from collections.abc import Iterator

# Google's library says that gRPC could tell more of its errors.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")
FILES = {"config.json": b"{}", "tokenizer.json": b"[1]", "weights/model.safetensors": b"w" * 1000}
S3, GCS = "s3://models/org/tiny", "gs://models/org/tiny"
OTHERS = {"org/tiny-2/config.json": b"another model", "org/tiny": b"no folder"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Bucket:
    """A bucket that tests write to."""

    uri: str

    def write(self, name: str, content: bytes) -> None:
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError


class S3Bucket(Bucket):
    """A bucket of moto's S3."""

    uri = S3

    def __init__(self) -> None:
        self._client = boto3.client("s3")
        self._client.create_bucket(Bucket="models")

    def write(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket="models", Key=name, Body=content)

    def remove(self, name: str) -> None:
        self._client.delete_object(Bucket="models", Key=name)


class GcsBucket(Bucket):
    """Objects of a stand-in for Google Cloud Storage."""

    uri = GCS

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self._generation = 0

    def write(self, name: str, content: bytes) -> None:
        self._generation += 1
        self.objects[name] = (self._generation, content)

    def remove(self, name: str) -> None:
        del self.objects[name]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    # As the pod has it: the endpoint's variables, and those of a Secret.
    (rendered,) = [each for each in fetch_steps(S3, endpoint=s3)[0] if each["name"] == "fetch-model"]
    variables = {each["name"]: each["value"] for each in rendered["env"] if "value" in each}
    for name, value in {**variables, **CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    client = boto3.client("s3")
    for bucket in client.list_buckets()["Buckets"]:
        for item in client.list_objects_v2(Bucket=bucket["Name"]).get("Contents", ()):
            client.delete_object(Bucket=bucket["Name"], Key=item["Key"])
        client.delete_bucket(Bucket=bucket["Name"])
    return S3Bucket()


@pytest.fixture
def gcs_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsBucket]:
    bucket = GcsBucket()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            path, _, name = address.path.partition("/b/models/o/")
            if path.startswith("/download"):
                return self._answer(bucket.objects[unquote(name)][1])
            items = [
                {"name": name, "size": str(len(content)), "generation": str(generation)}
                for name, (generation, content) in bucket.objects.items()
                if name.startswith(unquote(address.query.partition("prefix=")[2].partition("&")[0]))
            ]
            return self._answer(json.dumps({"name": "models", "items": items}).encode())

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "true")
    yield bucket
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["s3", "gcs"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    filled: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    for name, content in (*OTHERS.items(), *((f"org/tiny/{name}", content) for name, content in FILES.items())):
        filled.write(name, content)
    return filled


def read(folder: Path) -> dict[str, bytes]:
    """What a folder holds, apart from the mark of what is whole."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files.pop(FETCHED, None)
    return files


def test_engines_fetch_all_files_and_routers_those_that_they_read(bucket: Bucket, tmp_path: Path) -> None:
    revision = find_revision(bucket.uri)
    assert COMMIT.fullmatch(revision)
    fetch(bucket.uri, revision, tmp_path / "engine", [])
    assert read(tmp_path / "engine") == FILES
    fetch(bucket.uri, revision, tmp_path / "router", ["*.json"])
    assert read(tmp_path / "router") == {name: FILES[name] for name in ("config.json", "tokenizer.json")}


@pytest.mark.parametrize("change", ["written anew", "added", "removed"])
def test_a_model_that_changed_is_refused_and_its_revision_named(bucket: Bucket, tmp_path: Path, change: str) -> None:
    revision = find_revision(bucket.uri)
    if change == "removed":
        bucket.remove("org/tiny/tokenizer.json")
    else:
        bucket.write("org/tiny/config.json" if change == "written anew" else "org/tiny/more.json", b"[]")
    changed = find_revision(bucket.uri)
    assert changed != revision
    with pytest.raises(FetchError, match=f"are of revision {changed}, and {revision} is wanted"):
        fetch(bucket.uri, revision, tmp_path, [])
    assert read(tmp_path) == {}


def test_files_of_other_models_are_no_change(bucket: Bucket) -> None:
    revision = find_revision(bucket.uri)
    bucket.write("org/tiny-2/config.json", b"[]")
    assert find_revision(f"{bucket.uri}/") == revision


def test_what_was_fetched_whole_is_not_fetched_again_and_what_was_not_is(bucket: Bucket, tmp_path: Path) -> None:
    revision = find_revision(bucket.uri)
    (tmp_path / "config.json").write_text("half of it")
    fetch(bucket.uri, revision, tmp_path, [])
    assert read(tmp_path) == FILES
    bucket.remove("org/tiny/config.json")
    fetch(bucket.uri, revision, tmp_path, [])
    assert read(tmp_path) == FILES


def test_config_json_alone_is_not_everything_and_everything_has_it(bucket: Bucket, tmp_path: Path) -> None:
    """An engine's pod fetches config.json first, and the rest if an engine would take the model."""
    revision = find_revision(bucket.uri)
    fetch(bucket.uri, revision, tmp_path, [CONFIG_FILES])
    assert read(tmp_path) == {"config.json": FILES["config.json"]}
    fetch(bucket.uri, revision, tmp_path, [])
    assert read(tmp_path) == FILES
    bucket.remove("org/tiny/config.json")
    fetch(bucket.uri, revision, tmp_path, [CONFIG_FILES])
    fetch(bucket.uri, revision, tmp_path, [])
    assert read(tmp_path) == FILES


def test_a_folder_without_files_is_named(bucket: Bucket) -> None:
    with pytest.raises(FetchError, match="there are no files at"):
        find_revision(f"{bucket.uri}/nothing")


def fetch_steps(uri: str, **source: Any) -> tuple[list[Any], list[Any]]:
    """The init containers of engines and routers."""
    model = {"name": "org/tiny", "source": {"objectStorage": {"uri": uri, **source}}}
    engine, router = engine_template(model=model)["spec"], router_template(model=model)["spec"]
    return engine["initContainers"], router["initContainers"]


def run_in_pod(container: Any, folder: Path, revision: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of an init container, with its paths in a folder."""
    model = str(folder / "model")
    places = {"/dev/termination-log": str(folder / "answer"), "/model": model, "python": sys.executable}
    command = [places.get(word, word).replace("$(SLUICE_MODEL_REVISION)", revision) for word in container["command"]]
    command = [word.replace('"/model"', repr(model)) for word in command]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pods_resolve_and_fetch_as_their_commands_say(bucket: Bucket, tmp_path: Path) -> None:
    for name, steps in zip(("engine", "router"), fetch_steps(bucket.uri), strict=True):
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        resolve, fetching = steps
        assert run_in_pod(resolve, folder, "").returncode == 0
        revision = (folder / "answer").read_text()
        assert revision == find_revision(bucket.uri)
        done = run_in_pod(fetching, folder, revision)
        assert (done.returncode, done.stderr) == (0, "")
        expected = FILES if name == "engine" else {"config.json": b"{}", "tokenizer.json": b"[1]"}
        assert read(folder / "model") == expected
    again = run_in_pod(fetch_steps(bucket.uri)[0][1], tmp_path / "engine", "0" * 40)
    assert again.returncode == 0, "it is there already"
    (tmp_path / "other" / "model").mkdir(parents=True)
    refused = run_in_pod(fetch_steps(bucket.uri)[0][1], tmp_path / "other", "0" * 40)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"the files at {bucket.uri} are of revision")


def test_weights_of_a_model_that_engines_refuse_stay_where_they_are(bucket: Bucket, tmp_path: Path) -> None:
    bucket.write("org/tiny/config.json", b'{"state_size": 128}')
    done = run_in_pod(fetch_steps(bucket.uri)[0][1], tmp_path, find_revision(bucket.uri))
    assert done.returncode == 0
    assert "the weights of a model that is refused are not fetched" in done.stderr
    assert list(read(tmp_path / "model")) == ["config.json"]


def test_a_stored_revision_is_said_again_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MODEL_REVISION", "5" * 40)
    assert run_in_pod(fetch_steps(S3)[0][0], tmp_path, "").returncode == 0
    assert (tmp_path / "answer").read_text() == "5" * 40


def test_only_the_fetch_has_the_secret_and_the_way_to_the_store() -> None:
    model = {
        "name": "org/tiny",
        "revision": "5" * 40,
        "source": {"objectStorage": {"uri": S3, "endpoint": "http://minio:9000", "secretName": "s3"}},
    }
    for template in (engine_template(model=model), router_template(model=model)):
        (fetching,) = template["spec"]["initContainers"]
        assert fetching["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert {"name": "AWS_ENDPOINT_URL", "value": "http://minio:9000"} in fetching["env"]
        assert "$(" not in json.dumps(fetching["command"])
        main = json.dumps(template["spec"]["containers"][0])
        assert "envFrom" not in main
        assert "AWS_ENDPOINT_URL" not in main


@pytest.mark.parametrize(("revision", "folder"), [("5" * 40, "subPath"), ("v2", "subPathExpr")])
def test_clusters_that_share_a_claim_have_a_folder_for_each_revision(revision: str, folder: str) -> None:
    source = {"objectStorage": {"uri": GCS, "cacheClaimName": "cache"}}
    template = engine_template(model={"name": "org/tiny", "revision": revision, "source": source})
    *_, fetching = template["spec"]["initContainers"]
    of_revision = revision if folder == "subPath" else "$(SLUICE_MODEL_REVISION)"
    for container in (fetching, template["spec"]["containers"][0]):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "model"]
        assert mount[folder] == f"org--tiny--{of_revision}"


def test_the_guide_has_every_field_of_object_storage() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text()
    for field in ObjectStorageSource.model_fields.values():
        assert f"{field.alias}:" in page or f"`{field.alias}`" in page


def test_another_bucket_or_revision_is_another_model_and_another_way_to_it_is_not() -> None:
    def identify(revision: str | None = None, **source: Any) -> str:
        return identify_model(ModelSpec(name="m", revision=revision, source={"objectStorage": {"uri": S3, **source}}))

    assert identify() == identify(endpoint="http://minio", secretName="s3", cacheClaimName="c")
    assert len({identify(), identify(uri=GCS), identify(revision="v2")}) == 3

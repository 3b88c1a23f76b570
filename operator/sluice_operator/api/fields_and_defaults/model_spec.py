"""The field ``model`` of a ServingCluster's spec: which model, and where it comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_operator.api.field_types import (
    HttpUrl,
    KeyRef,
    ManifestModel,
    ObjectName,
    ObjectStorageUri,
    RelativePath,
    Text,
)


class ProxySpec(ManifestModel):
    """The proxy through which the model is fetched. Traffic among pods of the cluster never takes it."""

    http_proxy: HttpUrl | None = None
    """Proxy of http addresses (HTTP_PROXY)."""
    https_proxy: HttpUrl | None = None
    """Proxy of https addresses (HTTPS_PROXY)."""
    no_proxy: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Hosts and domains that are reached without it (NO_PROXY)."""


class CaBundle(ManifestModel):
    """Certificates of the authorities that are trusted, as PEM: exactly one."""

    secret_key_ref: KeyRef | None = None
    """Key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """Key of a ConfigMap."""


class HuggingFaceSource(ManifestModel):
    """The model is fetched from the Hugging Face Hub by model.name."""

    token_secret_ref: KeyRef | None = None
    """Key of the Secret that holds the token for gated models."""
    cache_claim_name: ObjectName | None = None
    """PersistentVolumeClaim that keeps what was fetched; each pod fetches for itself when absent."""
    endpoint: HttpUrl | None = None
    """Address of a mirror of the Hub (HF_ENDPOINT); https://huggingface.co when absent."""
    proxy: ProxySpec | None = None
    """The proxy through which the model is fetched. Traffic among pods of the cluster never takes it."""
    ca_bundle: CaBundle | None = None
    """Certificates of the authorities that are trusted when the model is fetched, instead of the public ones."""


class PersistentVolumeClaimSource(ManifestModel):
    """The model lies on a volume; `sluice up` looks in .sluice/volumes/<claimName>/<path>."""

    claim_name: ObjectName
    """Name of the claim."""
    path: RelativePath = "."
    """Directory of the model, relative to the volume."""


class ImageSource(ManifestModel):
    """The model lies in an OCI image, mounted as a volume."""

    reference: Text
    """Image reference."""
    path: RelativePath = "."
    """Directory of the model, relative to the image's root."""


class ObjectStorageSource(ManifestModel):
    """The model lies in S3, in a store that speaks its protocol, or in Google Cloud Storage."""

    uri: ObjectStorageUri
    """Bucket and folder of the model, such as s3://models/qwen or gs://models/qwen."""
    endpoint: HttpUrl | None = None
    """Address of a store other than the cloud's own (AWS_ENDPOINT_URL; STORAGE_EMULATOR_HOST for gs)."""
    secret_name: ObjectName | None = None
    """Secret whose keys are environment variables for the fetch, such as AWS_ACCESS_KEY_ID; the pod's service
    account signs in when absent."""
    cache_claim_name: ObjectName | None = None
    """PersistentVolumeClaim that keeps what was fetched; each pod fetches for itself when absent."""


class ModelSource(ManifestModel):
    """Where the model comes from: exactly one."""

    hugging_face: HuggingFaceSource | None = None
    """The Hugging Face Hub."""
    persistent_volume_claim: PersistentVolumeClaimSource | None = None
    """A volume."""
    object_storage: ObjectStorageSource | None = None
    """S3 or Google Cloud Storage."""
    image: ImageSource | None = None
    """An OCI image."""


class ModelSpec(ManifestModel):
    """The model; mounted read-only at /model in engines and routers."""

    name: Text
    """Name of the model, such as Qwen/Qwen2.5-14B-Instruct."""
    revision: Text | None = None
    """Revision of the model. What is no commit of the Hub's, and no digest of what object storage lists, is resolved
    once, and every pod fetches that."""
    served_name: Text | None = None
    """Name that clients use; model.name when absent."""
    source: ModelSource
    """Where it comes from: exactly one of the fields below."""

"""What makes a model another one, and where its revision is kept once it is resolved."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec

# Keys of the plan's ConfigMap that hold revisions, each followed by the model's id.
REVISION_KEY_PREFIX = "model-revision-"
# A revision that never moves: a commit, or a digest of what object storage lists. Branches and tags do.
COMMIT = re.compile(r"[0-9a-f]{40}")
# Characters of an id: it is a label's value and a part of names.
ID_CHARACTERS = 12


def list_identity(model: ModelSpec) -> list[tuple[str, str]]:
    """Lists what makes a model another one; its name for clients and the way to its files' cache do not."""
    claim, image, storage = model.source.persistent_volume_claim, model.source.image, model.source.object_storage
    where = f"{image.reference}/{image.path}" if image else "huggingFace"
    if storage is not None:
        where = storage.uri
    if claim is not None:
        where = f"{claim.claim_name}/{claim.path}"
    return [("name", model.name), ("revision", model.revision or "none"), ("source", where)]


def identify_model(model: ModelSpec) -> str:
    """Returns an id that differs for models whose tokens may differ."""
    return hashlib.sha256(json.dumps(list_identity(model)).encode()).hexdigest()[:ID_CHARACTERS]


def needs_resolution(model: ModelSpec) -> bool:
    """Whether the model's files depend on when they are fetched: it is fetched, and names nothing that never moves."""
    is_fetched = model.source.hugging_face is not None or model.source.object_storage is not None
    return is_fetched and not COMMIT.fullmatch(model.revision or "")


def name_revision_key(model_id: str) -> str:
    """Key under which the resolved revision of a model is stored."""
    return REVISION_KEY_PREFIX + model_id

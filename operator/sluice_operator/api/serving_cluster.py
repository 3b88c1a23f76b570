"""The ServingCluster: its spec with every rule checked, its metadata and its status."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from sluice_operator.api import cross_field_rules
from sluice_operator.api.field_types import ManifestModel
from sluice_operator.api.fields_and_defaults.cluster_spec import Metadata, SpecFields

KIND = "ServingCluster"


class ServingClusterSpec(SpecFields):
    """What the user wants."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [
            InitErrorDetails(
                type=PydanticCustomError(rule, "{message}", {"message": found.message}),
                loc=found.path,
                input=found.value,
            )
            for rule, found in cross_field_rules.find_violations(self)
        ]
        if broken:
            raise ValidationError.from_exception_data(type(self).__name__, broken)
        return self


class ServingCluster(ManifestModel):
    """One model served by P-heavy and D-heavy engines under latency objectives."""

    api_version: Literal["sluice.dev/v1alpha1"]
    """Version of this schema."""
    kind: Literal["ServingCluster"]
    """This kind."""
    metadata: Metadata
    """Its name."""
    spec: ServingClusterSpec
    """What the user wants."""
    status: dict[str, Any] | None = None
    """What the operator reports; ignored on input."""

    @property
    def served_name(self) -> str:
        """Name that clients use for the model."""
        return self.spec.model.served_name or self.spec.model.name

"""Who may use a router: API keys, JSON Web Tokens, and the limits of their owners."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import ManifestModel, ObjectName, Text

# Largest limit of an owner of API keys.
MAX_LIMIT = 2**31 - 1


class ApiKeyAuth(ManifestModel):
    """Keys that clients send as bearer tokens."""

    secret_name: ObjectName
    """Secret whose entries are the keys, each under its owner's name; changes of it are in force without a restart."""


class JwtAuth(ManifestModel):
    """JSON Web Tokens of an OpenID Connect issuer, that clients send as bearer tokens."""

    key_set_url: Annotated[str, Field(pattern=r"^(https://|file:///)[!-~]+$", max_length=1024)]
    """URL of the issuer's key set (JWKS), https or a file of the router's container; read every five minutes."""
    issuer: Text
    """Issuer (iss) that tokens must name."""
    audience: Text
    """Audience (aud) that tokens must be for."""
    owner_claim: Text = "sub"
    """Claim that names the owner."""
    leeway_seconds: Annotated[int, Field(strict=True, ge=0, le=300)] = 30
    """Most by which the issuer's clock and the routers' may differ."""


class OwnerLimitsSpec(ManifestModel):
    """What requests with one owner's keys may take, over all routers together."""

    owner: Annotated[str, Field(pattern=r"^[!-~]+$", max_length=253)]
    """Owner of the keys: the name of their entry in the Secret, or what a token's claim says; * stands for each owner
    that is not named."""
    requests_per_minute: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most requests in any minute."""
    tokens_per_minute: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most tokens, of prompts and outputs, of the requests of any minute. A request counts with prompt and max_tokens
    until it has ended."""
    concurrent_requests: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most requests at a time."""
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most output tokens of a request; also those of a request that does not say."""
    classes: Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(max_length=17)] = ()
    """Classes of slo.classes that requests may use, an empty name for the default objectives; all when absent. Their
    highest priority is the highest that a request may ask for."""
    weight: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """Share of the tokens that this owner gets while requests of several owners wait."""


class AuthSpec(ManifestModel):
    """Who may use the API."""

    mode: Literal["None", "APIKey", "JWT", "APIKeyOrJWT"] = "None"
    """None serves everybody who reaches the port; APIKey requires a key, JWT a token, APIKeyOrJWT one of the two."""
    api_key: ApiKeyAuth | None = None
    """Required by the modes with APIKey, refused otherwise."""
    jwt: JwtAuth | None = None
    """Required by the modes with JWT, refused otherwise."""
    limits: Annotated[tuple[OwnerLimitsSpec, ...], FieldEffect.LIVE, Field(max_length=256)] = ()
    """Limits of the keys' owners; owners without any are not limited. In force without a restart."""

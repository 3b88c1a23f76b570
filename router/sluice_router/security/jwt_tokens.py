"""JSON Web Tokens that clients send as bearer tokens, as OpenID Connect issuers make them (RFC 7519, RFC 7517).

A token counts if a key of the issuer signed it, and issuer, audience and time are right. One of its claims names the
owner. Algorithms with a shared secret are refused, because a key set is public.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import jwt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice_router.errors import MIN_RETRY_S, KeysUnavailableError, UnauthenticatedError

logger = logging.getLogger(__name__)

ALGORITHMS = frozenset({f"{kind}{bits}" for kind in ("RS", "ES", "PS") for bits in (256, 384, 512)} | {"EdDSA"})
# What limits and metrics take as an owner.
OWNER = re.compile(r"[!-~]{1,253}")
LEEWAY_S = 30.0  # most by which the issuer's clock and this one may differ
# Issuers announce new keys some time before they sign with them.
REFRESH_S = 300.0
# Shortest time between two readings, whoever sends tokens with unknown keys.
RETRY_S = 5.0
FETCH_TIMEOUT_S = 10.0
MAX_KEY_SET_BYTES = 1 << 20
# Tokens that were found right are not checked again while they are in use.
MAX_CHECKED = 4096


class JwtSettings(BaseModel):
    """Whose JSON Web Tokens count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jwt_keys: str = Field(
        default="",
        pattern=r"^(|https://.+|file:///.+)$",
        description="https or file URL of the issuer's key set (JWKS); no tokens count when empty",
    )
    jwt_issuer: str = Field(default="", description="issuer (iss) that tokens must name")
    jwt_audience: str = Field(default="", description="audience (aud) that tokens must be for")
    jwt_owner_claim: str = Field(default="sub", min_length=1, description="claim that names the owner")
    jwt_leeway_s: float = Field(default=LEEWAY_S, ge=0, le=300, description="most by which clocks may differ")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.jwt_keys and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError("--jwt-keys needs --jwt-issuer and --jwt-audience")
        return self


class JwtVerifier:
    """Finds the owners of tokens.

    Args:
        settings: Whose tokens count.
        clock: Unix time in seconds.
        tls: How the issuer's certificate is checked; None: by the system's authorities.

    Attributes:
        fault: Why no token can be checked; empty while they can.
    """

    def __init__(
        self, settings: JwtSettings, clock: Callable[[], float] = time.time, tls: ssl.SSLContext | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._tls = tls
        self._keys: dict[str, jwt.PyJWK] = {}
        # Owner and end by the token's digest, oldest first.
        self._checked: dict[bytes, tuple[str, float]] = {}
        self._is_wanted = asyncio.Event()
        self.fault = f"the keys at {settings.jwt_keys} have not been read yet; tokens are refused"

    def find_owner(self, token: str) -> str:
        """Finds the owner that a token names.

        Raises:
            KeysUnavailableError: There are no keys to check it with.
            UnauthenticatedError: It does not count; says why, and never quotes it.
        """
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        known = self._checked.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        if not self._keys:
            raise KeysUnavailableError(
                "this router has no keys to check tokens with; try again later", retry_after_s=MIN_RETRY_S
            )
        try:
            claims = self._decode(token)
        except (jwt.PyJWTError, UnicodeEncodeError) as error:
            raise UnauthenticatedError(f"the token is not valid: {error}", code="invalid_token") from error
        owner = claims.get(self._settings.jwt_owner_claim)
        if not isinstance(owner, str) or not OWNER.fullmatch(owner):
            message = (
                f"the token's claim {self._settings.jwt_owner_claim} must be 1 to 253 characters of ASCII, no spaces"
            )
            raise UnauthenticatedError(message, code="invalid_token")
        if len(self._checked) >= MAX_CHECKED:
            del self._checked[next(iter(self._checked))]
        self._checked[digest] = owner, claims["exp"] + self._settings.jwt_leeway_s
        return owner

    def _decode(self, token: str) -> dict[str, Any]:
        settings = self._settings
        key_id = jwt.get_unverified_header(token).get("kid", "")
        key = self._keys.get(key_id)
        if key is None and not key_id and len(self._keys) == 1:
            (key,) = self._keys.values()
        if key is None:
            # The issuer may have a new one.
            self._is_wanted.set()
            raise jwt.InvalidKeyError("its key is not the issuer's")
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=sorted(ALGORITHMS & {key.algorithm_name}),
            audience=settings.jwt_audience,
            issuer=settings.jwt_issuer,
            leeway=settings.jwt_leeway_s,
            options={"require": ["exp", "iss", "aud", settings.jwt_owner_claim]},
        )
        return claims

    async def keep(self, changed: Callable[[], None]) -> None:
        """Reads the keys again and again, for ever.

        Args:
            changed: Called after each reading.
        """
        while True:
            await self.refresh()
            changed()
            self._is_wanted.clear()
            await asyncio.sleep(RETRY_S)
            if not self.fault:
                try:
                    async with asyncio.timeout(REFRESH_S - RETRY_S):
                        await self._is_wanted.wait()
                except TimeoutError:
                    pass

    async def refresh(self) -> None:
        """Reads the keys; the old ones stay in force when that fails."""
        try:
            keys = read_key_set(await self._fetch())
        except (OSError, ValueError, aiohttp.ClientError, TimeoutError, jwt.PyJWTError) as error:
            logger.warning("keys of tokens: %s cannot be read: %s", self._settings.jwt_keys, error)
            if not self._keys:
                self.fault = f"{self._settings.jwt_keys} cannot be read: {error}; tokens are refused"
            return
        if keys.keys() != self._keys.keys():
            logger.info("keys of tokens: %d are in force", len(keys))
        # A token of a key that was withdrawn counts no more.
        self._keys, self._checked, self.fault = keys, {}, ""

    async def _fetch(self) -> bytes:
        url = urlsplit(self._settings.jwt_keys)
        if url.scheme == "file":
            return Path(url.path).read_bytes()  # noqa: ASYNC240 - a small mounted file
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self._settings.jwt_keys, ssl=self._tls or True, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            content = bytearray()
            async for part in answer.content.iter_any():
                content += part
                if len(content) > MAX_KEY_SET_BYTES:
                    raise ValueError(f"it has more than {MAX_KEY_SET_BYTES} bytes, which is the limit")
        return bytes(content)


def read_key_set(content: bytes) -> dict[str, jwt.PyJWK]:
    """Reads the keys of a JSON Web Key Set that may sign tokens, by their id.

    Raises:
        ValueError: It is no key set.
        jwt.PyJWTError: It has no key that can be used.
    """
    found = jwt.PyJWKSet.from_json(content.decode())
    keys = {
        key.key_id or "": key
        for key in found.keys
        if key.algorithm_name in ALGORITHMS and key.public_key_use in {None, "sig"}
    }
    if not keys:
        raise ValueError(f"it has no key for signatures with {', '.join(sorted(ALGORITHMS))}")
    return keys

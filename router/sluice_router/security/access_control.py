"""What guards the ports of clients: whose keys are asked for, and which certificate is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sluice.certificate_rotation import CertificateFolder
from sluice_router.security.api_keys import ApiKeys, read_bearer
from sluice_router.security.jwt_tokens import JwtVerifier

# What says whether and how the router runs, and nothing about requests: open to those who have no key.
PROBE_PATHS = frozenset({"/health", "/livez", "/readyz"})


class OwnerFinder(Protocol):
    """Knows who sends a request."""

    def find_owner(self, authorization: str | None) -> str:
        """Finds the owner of what a request carries.

        Args:
            authorization: Its header of that name; None: it has none.

        Raises:
            KeysUnavailableError: There is nothing to compare with.
            UnauthenticatedError: It carries nothing, or nobody's.
        """
        ...


class TokensOrKeys:
    """Takes tokens of an issuer, and API keys beside them.

    Args:
        tokens: Checks tokens.
        keys: Checks everything else; None: nothing else counts.
    """

    def __init__(self, tokens: JwtVerifier, keys: ApiKeys | None) -> None:
        self._tokens = tokens
        self._keys = keys

    def find_owner(self, authorization: str | None) -> str:
        """See ``OwnerFinder``."""
        token = read_bearer(authorization, "a token")
        # A token is three parts in base64, the first of which begins a JSON object; no key need look so.
        if self._keys is None or (token.startswith("eyJ") and token.count(".") == 2):
            return self._tokens.find_owner(token)
        return self._keys.find_owner(authorization)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """The guards of HTTP and gRPC alike.

    Args:
        keys: Knows who sends a request by its key or token; None: everybody is served.
        certificates: Certificate of the ports; None: nothing is encrypted.
        origins: Origins of web pages that may call over HTTP; ``*`` for all.
    """

    keys: OwnerFinder | None = None
    certificates: CertificateFolder | None = None
    origins: frozenset[str] = frozenset()


OPEN_ACCESS = ClientAccess()

"""What guards the ports of clients: whose keys are asked for, and which certificate is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.certificate_rotation import CertificateFolder
    from sluice_router.security.api_keys import ApiKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """The guards of HTTP and gRPC alike.

    Args:
        keys: Keys that requests must carry; None: everybody is served.
        certificates: Certificate of the ports; None: nothing is encrypted.
        origins: Origins of web pages that may call over HTTP; ``*`` for all.
    """

    keys: ApiKeys | None = None
    certificates: CertificateFolder | None = None
    origins: frozenset[str] = frozenset()


OPEN_ACCESS = ClientAccess()

"""Keys and certificates of a router: made from the settings at the start, renewed when their folders change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import grpc
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.certificate_rotation import CertificateFolder, keep_fresh
from sluice.certificates import make_client_context
from sluice.grpc_credentials import PeerCheck, make_server_credentials
from sluice_router.engines.engine_stream import ALPN, PeerTls
from sluice_router.security.access_control import ClientAccess, TokensOrKeys
from sluice_router.security.api_keys import ApiKeys
from sluice_router.security.jwt_tokens import JwtSettings, JwtVerifier


class SecuritySettings(BaseModel):
    """Who may use a router, and how it speaks with clients, engines and the control plane."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_keys: str = Field(
        default="", description="folder with a file of API keys per owner; everybody is served when empty"
    )
    allowed_origins: str = Field(
        default="",
        description="origins of web pages that may call from a browser, with commas between them; * for all",
    )
    front_tls: str = Field(
        default="", description="folder with tls.crt and tls.key of the clients' ports; not encrypted when empty"
    )
    peer_tls: str = Field(
        default="",
        description="folder with tls.crt, tls.key and ca.crt for engines and the control port; "
        "not encrypted when empty",
    )
    engine_name: str = Field(default="", description="DNS name that engines' certificates must be for, with --peer-tls")
    control_name: str = Field(
        default="", description="DNS name that certificates of the control port's clients must be for, with --peer-tls"
    )
    jwt: JwtSettings = JwtSettings()

    @model_validator(mode="after")
    def _name_peers(self) -> Self:
        if self.peer_tls and not (self.engine_name and self.control_name):
            raise ValueError("--peer-tls needs --engine-name and --control-name")
        return self


class PeerSecurity:
    """How a router speaks with engines, and who may use its control port.

    Args:
        folder: Its certificate for both.
        engine_name: Name that engines' certificates must be for.
        control_name: Name that the control plane's certificate must be for.
    """

    def __init__(self, folder: CertificateFolder, engine_name: str, control_name: str) -> None:
        self.folder = folder
        self._engine_name = engine_name
        self._control_name = control_name
        self._engine_tls = self._make_engine_tls()

    @property
    def engine_tls(self) -> PeerTls:
        """For the next stream to an engine."""
        return self._engine_tls

    @property
    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """Keep everybody but the control plane from the control port."""
        return (PeerCheck([self._control_name]),)

    def make_server_credentials(self) -> grpc.ServerCredentials:
        """For the control port."""
        return make_server_credentials(self.folder)

    def renew(self) -> None:
        """Uses the newest certificate from now on."""
        self._engine_tls = self._make_engine_tls()

    def _make_engine_tls(self) -> PeerTls:
        context = make_client_context(self.folder.current)
        context.set_alpn_protocols([ALPN])
        return PeerTls(context=context, engine_name=self._engine_name)


class RouterSecurity:
    """Everything that guards a router's ports and its streams to engines.

    Args:
        settings: The router's.

    Attributes:
        access: What guards the ports of clients.
        peers: How engines and control plane are spoken with; None: in the open.

    Raises:
        CertificateError: A certificate cannot be used.
    """

    def __init__(self, settings: SecuritySettings) -> None:
        self._api_keys = ApiKeys(Path(settings.api_keys)) if settings.api_keys else None
        self.tokens = JwtVerifier(settings.jwt) if settings.jwt.jwt_keys else None
        self.client_access = ClientAccess(
            keys=TokensOrKeys(self.tokens, self._api_keys) if self.tokens else self._api_keys,
            certificates=CertificateFolder(Path(settings.front_tls), is_mutual=False) if settings.front_tls else None,
            origins=frozenset(settings.allowed_origins.split(",")) - {""},
        )
        self.peers: PeerSecurity | None = None
        if settings.peer_tls:
            folder = CertificateFolder(Path(settings.peer_tls), is_mutual=True)
            self.peers = PeerSecurity(folder, settings.engine_name, settings.control_name)

    async def keep(
        self,
        *,
        set_fault: Callable[[str], None],
        keep_owners: Callable[[frozenset[str]], None],
        renew_client_certificate: Callable[[], None],
    ) -> None:
        """Follows the folders for ever.

        Args:
            set_fault: Called with the reason why no client can be let in; empty: they can.
            keep_owners: Called with everybody who has a key, when that changes; owners of tokens are not known.
            renew_client_certificate: Shows the newest certificate to new clients.
        """
        keys, tokens, certificates, peers = self._api_keys, self.tokens, self.client_access.certificates, self.peers

        def tell_fault() -> None:
            faults = [guard.fault for guard in (keys, tokens) if guard is not None]
            # While one of the two lets clients in, the router serves.
            set_fault("; ".join(faults) if all(faults) else "")

        def refresh() -> None:
            if keys is not None and keys.refresh():
                if tokens is None:
                    keep_owners(keys.owners)
                tell_fault()
            if certificates is not None and certificates.refresh():
                renew_client_certificate()
            if peers is not None and peers.folder.refresh():
                peers.renew()

        tell_fault()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_fresh([refresh]), name="folders")
            if tokens is not None:
                tasks.create_task(tokens.keep(tell_fault), name="keys of tokens")

    def collect(self) -> Iterator[Metric]:
        """Yields when certificates end; called by ``prometheus_client`` at a scrape."""
        expiry = GaugeMetricFamily(
            "sluice_certificate_expiry_timestamp_seconds", "End of a certificate's time.", labels=("use",)
        )
        folders = {"front": self.client_access.certificates, "peers": self.peers.folder if self.peers else None}
        for use, folder in folders.items():
            if folder is not None:
                expiry.add_metric((use,), folder.current.expires_unix_s)
        yield expiry

"""Limits of the HTTP API."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HttpSettings(BaseModel):
    """Settings of the HTTP API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest request body, unpacked.")
    max_header_bytes: int = Field(default=16 * 1024, ge=1024, description="Request line and headers together.")
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="First byte of a request to the end of its headers."
    )
    body_timeout_s: float = Field(default=60.0, gt=0, description="End of the headers to the end of the body.")
    idle_timeout_s: float = Field(default=75.0, gt=0, description="Between two requests of a connection.")
    stream_interval_tokens: int = Field(default=1, ge=1, description="Tokens per event after the first.")
    comment_interval_s: float = Field(
        default=10.0, gt=0, description="Between two comments of a stream that waits for the first engine."
    )
    write_buffer_bytes: int = Field(
        default=64 * 1024, ge=1024, description="Unsent bytes at which a client counts as paused."
    )
    max_stream_buffered_bytes: int = Field(
        default=256 * 1024, ge=1024, description="Most bytes held for a paused client."
    )
    max_paused_s: float = Field(default=30.0, gt=0, description="Longest pause of a client.")
    max_total_buffered_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="Most bytes held for all paused clients."
    )

"""The roles of the core as an enum of the wire, and back. Derived by name: a new value needs no table."""

from __future__ import annotations

from sluice.v1 import plan_pb2
from sluice_core.records import Role

PROTO_ROLES = {role: plan_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
# A role that a newer router reports, or none, is not in here.
ROLES = {value: role for role, value in PROTO_ROLES.items()}

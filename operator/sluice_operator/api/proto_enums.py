"""The manifest's and the core's names in the wire's enums, and back; derived by name, so that a new value needs no table."""

from __future__ import annotations

from typing import get_args

from sluice.v1 import plan_pb2
from sluice_core.records import EarlyRejection, Role
from sluice_operator.api.spec import StrategyName

PROTO_ROLES = {role: plan_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
# A role that a newer router reports, or none, is not in here.
ROLES = {value: role for role, value in PROTO_ROLES.items()}
PROTO_STRATEGIES = {name: plan_pb2.Strategy.Value(f"STRATEGY_{name.upper()}") for name in get_args(StrategyName)}
STRATEGY_NAMES = {value: name for name, value in PROTO_STRATEGIES.items()}
PROTO_EARLY_REJECTIONS = {
    str(rejection): plan_pb2.EarlyRejection.Value(f"EARLY_REJECTION_{rejection.name}") for rejection in EarlyRejection
}

"""Where messages of conditions refer to the runbook: by a section's name, or by a link to it.

A message is made where nothing is known of the installation, and gets its link when it is written.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.condition_types import Reason

REFERENCE = re.compile(r"see (\w+) in the runbook")


def refer_to_runbook(reason: Reason) -> str:
    """Says where the runbook explains a reason; it has a section of this name."""
    return f"see {reason} in the runbook"


def link_runbook(message: str, url: str) -> str:
    """Replaces references to the runbook by links.

    Args:
        message: A condition's.
        url: Address of the runbook, as alerts have it; empty: there is none, and names stay.
    """
    return REFERENCE.sub(lambda found: f"see {url}#{found[1].lower()}", message) if url else message

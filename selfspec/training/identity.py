"""What a draft and its data belong to: the target's fingerprint and the hash of its chat template."""

from __future__ import annotations

import hashlib
from typing import Any

from selfspec.target import Target


def target_identity(target: Target, template_text: str = "") -> dict[str, Any]:
    """Name, shape and fingerprint of a target; milliseconds."""
    return {
        "name": target.name,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "width": target.width,
        "fingerprint": target.fingerprint,
        "template": hashlib.sha256(template_text.encode()).hexdigest()[:16],
    }

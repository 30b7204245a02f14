"""Ways of drafting, one file each, behind one protocol."""

from selfspec.drafters.base import Draft, Drafter, NoDraft
from selfspec.drafters.registry import DRAFTERS, build_drafter, load_drafter

__all__ = ["DRAFTERS", "Draft", "Drafter", "NoDraft", "build_drafter", "load_drafter"]

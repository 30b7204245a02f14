"""What a draft and its data belong to: see `selfspec.target.identity`."""

from selfspec.target.identity import fingerprint, target_identity

__all__ = ["fingerprint", "target_identity"]

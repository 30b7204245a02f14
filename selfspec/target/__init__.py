"""A Hugging Face causal LM as a stack: embed, layers [a, b), norm, head; what differs between families; loading."""

from selfspec.target.loading import load_target, wrap_target
from selfspec.target.stack import Target

__all__ = ["Target", "load_target", "wrap_target"]

"""Drafts trained from the target: data it writes itself, losses, the trainer, checkpoints."""

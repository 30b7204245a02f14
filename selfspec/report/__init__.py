"""From run directories to tables, figures and pages. Imports records only: no torch, hydra, wandb or transformers."""

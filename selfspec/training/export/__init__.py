"""Drafts in other projects' formats, and theirs in ours.

Out: our EAGLE-3 as a `speculators` folder or in the flat `midlayer` layout (`eagle3_out`), a LayerSkip draft as a plain
transformers model (`layerskip_out`). In: published EAGLE-3 (`eagle3_in`), Medusa and Hydra heads (`heads_in`).
"""

"""Which drafter, exit layer, K, tree and policy is fastest for a target here: `tuner` says how it is found out."""

"""Clocks, the measuring protocol, memory, the plain HF baseline, and the divergence report."""

"""Packages for the MLSys 2026 FlashInfer contest: one operator for one architecture as a solution
of flashinfer-bench, and its check with that evaluator (docs/contest.md)."""

"""Makes dispatch tables. Depends on fastkernels, which knows nothing of it."""

__version__ = "0.1.0"

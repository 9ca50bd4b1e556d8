"""The version, where parts of the package can read it without importing all of it."""

__version__ = "0.1.0"

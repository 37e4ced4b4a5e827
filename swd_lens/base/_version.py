"""The package's version, written into every file and result."""

__version__ = "0.1.0"

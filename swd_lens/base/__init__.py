"""Below everything: files, the machine, figures, panels and cards, the package's version. Imports nothing else of swd_lens."""

__version__ = "0.1.0"  # written into every file and result

"""Below everything: files, the machine, figures, panels and cards, the package's version. Imports nothing else of swd_lens."""

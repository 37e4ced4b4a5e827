"""HookedTransformer as a host: host.py, its components with units in them, runs that take up at a block."""

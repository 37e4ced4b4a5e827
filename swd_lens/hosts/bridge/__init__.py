"""TransformerBridge as a host: host.py, its leaves and norms, caches, runs that take up at a block."""

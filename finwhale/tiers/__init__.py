"""Where cached blocks live behind the engine's pools: one interface, a tier per file."""

"""One training loop; `train` runs a `RunConfig` in a folder."""

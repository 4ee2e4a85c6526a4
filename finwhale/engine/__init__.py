"""Turning a model into tokens. Speaks token ids, never text."""

"""What a sequence keeps between calls, and how it is restored."""

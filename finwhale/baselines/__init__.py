"""Models that this one is compared with; they train in the same loop on the same rows."""

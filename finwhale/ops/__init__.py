"""One file per operation: its contract and its plain-torch definition."""

from finwhale.ops.record import FAST, REFERENCE, Ops

__all__ = ["FAST", "REFERENCE", "Ops"]

"""Modules named as checkpoint keys; `Backbone` is the whole text model."""

from finwhale.model.backbone import Backbone
from finwhale.model.numerics import Numerics
from finwhale.model.packing import Packing

__all__ = ["Backbone", "Numerics", "Packing"]

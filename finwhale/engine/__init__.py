"""Turning a model into tokens. Speaks token ids, never text."""

from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine, QueueFullError
from finwhale.engine.request import (
    Constraint,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenResult,
)

__all__ = [
    "Constraint",
    "Engine",
    "EngineConfig",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenResult",
]

"""Checkpoints: reading, checking and writing folders in the released layout."""

from finwhale.checkpoint.folder import CheckpointError, CheckpointFolder, read_folder
from finwhale.checkpoint.hashed_weights import fill_hashed, hashed_tensor, hashed_tensors
from finwhale.checkpoint.load import LoadedModel, LoadReport, load_model
from finwhale.checkpoint.plan import SkippedPart
from finwhale.checkpoint.save import SaveReport, save_checkpoint, save_tensors
from finwhale.checkpoint.tiny import write_tiny

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "LoadReport",
    "LoadedModel",
    "SaveReport",
    "SkippedPart",
    "fill_hashed",
    "hashed_tensor",
    "hashed_tensors",
    "load_model",
    "read_folder",
    "save_checkpoint",
    "save_tensors",
    "write_tiny",
]

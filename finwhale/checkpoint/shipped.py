"""Where the model lies that comes with the repository: models/finwhale-mini.

Owns that one path. It refuses to guess: a folder that is not there costs a sentence that says how
to get it, and nothing is fetched. The mistake to avoid: looking for the model in an installed
wheel, which holds code alone; the model belongs to a clone of the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

from finwhale.checkpoint.folder import CheckpointError
from finwhale.config.files import kind_of_file

VARIABLE = "FINWHALE_MINI"
_IN_REPOSITORY = Path("models") / "finwhale-mini"


def shipped_model() -> Path:
    """Return the folder of finwhale-mini: config.json, weights, tokenizer.json.

    The environment variable FINWHALE_MINI names another place for it; without one it is looked
    for beside the package, as in a clone. Raises CheckpointError if there is no such model.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / _IN_REPOSITORY
    if (folder / "config.json").is_file():
        return folder
    remedy = f"correct {VARIABLE} or unset it"
    if not named:
        remedy = (
            "it comes with a clone of the repository, not with an installed wheel; set "
            f"{VARIABLE} to its folder, or name a checkpoint of your own with --model"
        )
    raise CheckpointError(
        folder, expected="the shipped model finwhale-mini", found="no config.json", remedy=remedy
    )


def checkpoint_folder(named: Path | None) -> Path:
    """Return `named` if it is a checkpoint folder, or the shipped model's if nothing is named.

    Raises CheckpointError that names the folder: the first file missed would point elsewhere.
    """
    if named is None:
        return shipped_model()
    # What is there but no file is named by whoever reads it.
    if kind_of_file(named / "config.json") != "no such file":
        return named
    found = "no config.json" if named.is_dir() else "no such folder"
    raise CheckpointError(
        named,
        expected="a checkpoint folder with config.json, weights and tokenizer.json",
        found=found,
        remedy="name another one, or none for the shipped model",
    )

"""Write what every command's --help prints to help_*.txt beside this file; `make golden` runs it.

The stored texts pin the command line: a new flag or a changed sentence shows up as a diff.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COLUMNS = "100"


def help_texts() -> dict[str, str]:
    """Return {file name: help text} of the program and of every command."""
    from finwhale import cli

    return {
        f"help_{name or 'finwhale'}.txt": help_text([name] if name else [])
        for name in ("", *cli.COMMANDS)
    }


def help_text(command: list[str]) -> str:
    """Return what `finwhale COMMAND --help` prints into a pipe 100 columns wide."""
    from finwhale import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def main() -> None:
    """Replace the stored texts and remove those of commands that are gone."""
    os.environ["COLUMNS"] = COLUMNS
    texts = help_texts()
    for stale in FOLDER.glob("help_*.txt"):
        if stale.name not in texts:
            stale.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

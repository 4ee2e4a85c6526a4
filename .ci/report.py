"""What a test run amounted to: size and coverage by room, tests by folder, one closing line.

Reads the JUnit file that pytest wrote and, for `make coverage`, the combined coverage data. Fails
when an expected folder ran nothing, when coverage is below the floor, or when a test failed. The
easy mistake: trusting an exit code of a run that collected no test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

COVERAGE_FLOOR = 90.0
EXPECTED_FOLDERS = ("unit", "property", "parity", "golden", "e2e")


def count_tests(junit: Path) -> dict[str, Counter[str]]:
    """Return {folder: Counter(passed, failed, skipped)} of one JUnit file."""
    folders: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        folder = parts[1] if len(parts) > 1 and parts[0] == "tests" else "?"
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        folders.setdefault(folder, Counter())[outcome] += 1
    return folders


def coverage_by_room(data: dict) -> dict[str, tuple[int, int]]:
    """Return {room: (covered lines, lines)} of a `coverage json` object."""
    rooms: dict[str, tuple[int, int]] = {}
    for name, entry in data["files"].items():
        parts = Path(name).parts
        room = "/".join(parts[:2]) if len(parts) > 2 else "/".join(parts)
        summary = entry["summary"]
        covered, total = rooms.get(room, (0, 0))
        rooms[room] = (
            covered + summary["covered_lines"],
            total + summary["num_statements"],
        )
    return rooms


def problems(
    folders: dict[str, Counter[str]],
    covered: int | None,
    statements: int,
    expected=EXPECTED_FOLDERS,
) -> list[str]:
    """Return one sentence for each reason to refuse the run; covered is None if not measured."""
    found = [
        f"tests/{name}: expected, but no test ran"
        for name in expected
        if not folders.get(name, Counter())["passed"] + folders.get(name, Counter())["failed"]
    ]
    if covered is None:
        return found
    share = 100 * covered / statements if statements else 0.0
    if share < COVERAGE_FLOOR:
        found.append(f"line coverage {share:.1f} %, floor {COVERAGE_FLOOR:.0f} %")
    return found


def _coverage_json(root: Path) -> dict:
    out = root / "build" / "ci" / "coverage.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for arguments in (["combine", "--quiet"], ["json", "--quiet", "-o", str(out)]):
        subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=root, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def _print_rooms(root: Path) -> tuple[int, int]:
    """Print size and coverage by room; return covered lines and all."""
    rooms = coverage_by_room(_coverage_json(root))
    print(f"\n{'room':<24}{'lines':>8}{'covered':>9}{'share':>8}")
    for room, (covered, total) in sorted(rooms.items()):
        share = 100 * covered / total if total else 100.0
        path = root / room
        sources = path.rglob("*.py") if path.is_dir() else [path]
        lines = sum(len(s.read_text(encoding="utf-8").splitlines()) for s in sources)
        print(f"{room:<24}{lines:>8}{covered:>5}/{total:<5}{share:>5.1f} %")
    covered, statements = (sum(values) for values in zip(*rooms.values(), strict=True))
    print(f"{'all':<24}{'':>8}{covered:>5}/{statements:<5}{100 * covered / statements:>5.1f} %\n")
    return covered, statements


def main() -> int:
    """Print the tables and the closing line; return 1 if the run must not count."""
    root, junit = Path(__file__).resolve().parents[1], Path(sys.argv[1])
    folders = count_tests(junit)
    covered, statements = _print_rooms(root) if "--coverage" in sys.argv else (None, 0)
    for name, counts in sorted(folders.items()):
        print(
            f"tests/{name}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
    found = problems(folders, covered, statements)
    for problem in found:
        print(f"refused: {problem}")
    total = sum(folders.values(), Counter())
    # A refusal is a failure of the run, so it counts as one.
    print(f"{total['passed']} passed, {total['failed'] + len(found)} failed")
    return 1 if found or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

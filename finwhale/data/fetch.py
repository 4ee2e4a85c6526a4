"""Download pinned package files through the registries' own tools, and read what is inside.

Owns the cache folder (CACHE/REGISTRY/FILE), the check of every file's SHA-256, and the reading
of archives in memory: nothing is unpacked to disk, installed or run. Refused: a file of another
hash, a path that is absolute or climbs with `..`, a member above 64 MiB; links are skipped. The
easy mistake: `apt-get download A B` fetches nothing when one of them is unknown, so every
package is asked for alone. This file names no host: the tools know where their registries are.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from finwhale.data.clean import html_to_text, rst_to_text, tagged_to_text, wordnet_to_texts
from finwhale.data.packages import Package

MAX_MEMBER_BYTES = 64 * 2**20
DICTIONARY_DOCUMENT_CHARS = 65_536

Progress = Callable[[str], None]
Runner = Callable[[Sequence[str], Path], None]


class FetchError(ValueError):
    """A package that could not be had, or a file that is not the pinned one."""


class ArchiveError(ValueError):
    """An archive with a member that must not be read."""


def download_command(package: Package, folder: Path) -> list[str]:
    """Return the command that puts the package's file into `folder` (its working folder)."""
    wanted = f"{package.package}{'@' if package.registry == 'npm' else '='}{package.version}"
    if package.registry == "debian":
        return ["apt-get", "download", wanted]
    if package.registry == "npm":
        return ["npm", "pack", "--loglevel=error", "--pack-destination", str(folder), wanted]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), wanted.replace("=", "==")]
    if not package.file.endswith(".whl"):
        return [*command, "--no-binary=:all:"]
    # The pinned wheel, whatever machine this is: its Python files are read, not installed.
    platform = "--platform=manylinux_2_28_x86_64"
    return [*command, "--only-binary=:all:", platform, "--python-version=3.11"]


def run_tool(command: Sequence[str], folder: Path) -> None:
    """Run a download command in `folder`; raise FetchError with its own words."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FetchError(f"{command[0]}: no such program; install it first") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in lines if line.startswith(("E:", "ERROR", "npm error", "npm ERR"))]
        said = said[:2] or lines[-1:] or ["no output"]
        raise FetchError(f"{command[0]}: {'; '.join(line[:160] for line in said)}")


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_package(
    package: Package, cache: Path, *, progress: Progress | None = None, run: Runner = run_tool
) -> Path:
    """Return the package's file in `cache`, downloaded unless it is there with the right hash.

    Raises FetchError naming the package: the tool failed, brought another file, or the bytes
    differ from the pinned ones. A wrong file never enters the cache.
    """
    file = cache / package.registry / package.file
    say = progress or (lambda _: None)
    if file.exists():
        _check(package, file, f"delete {file} and fetch again")
        say(f"{package.name}: {package.file} is there")
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    say(f"{package.name}: fetching {package.file}")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".partial-") as name:
        folder = Path(name)
        # apt-get drops its rights while it downloads and must still be able to write here.
        folder.chmod(0o777)
        remedy = f"see whether {package.registry} still has version {package.version}"
        try:
            run(download_command(package, folder), folder)
        except FetchError as error:
            raise FetchError(f"{package.name}: {error}; {remedy}") from None
        found = sorted(path.name for path in folder.iterdir())
        if found != [package.file]:
            raise FetchError(f"{package.name}: got {found}, expected {package.file}; {remedy}")
        _check(package, folder / package.file, "pin the new file if its contents are wanted")
        os.replace(folder / package.file, file)
    return file


def _check(package: Package, file: Path, remedy: str) -> None:
    found = sha256_of(file)
    if found != package.sha256:
        raise FetchError(
            f"{package.name}: sha256 of {package.file}: got {found}, expected {package.sha256}; "
            f"{remedy}"
        )


def fetch_all(
    packages: Iterable[Package],
    cache: Path,
    *,
    progress: Progress | None = None,
    run: Runner = run_tool,
) -> dict[str, Path]:
    """Return the file of each package by name.

    Every package is tried before the first failure is reported, so what could be had stays in
    the cache. Raises one FetchError that names all failures.
    """
    files: dict[str, Path] = {}
    problems: list[str] = []
    for package in packages:
        try:
            files[package.name] = fetch_package(package, cache, progress=progress, run=run)
        except FetchError as error:
            problems.append(str(error))
    if problems:
        raise FetchError("\n".join(problems))
    return files


def _checked_name(name: str, archive: Path) -> str:
    """Return a member's path without a leading `./`, or raise ArchiveError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ArchiveError(
            f"{archive.name}: member {name!r}: expected a relative path without '..'; "
            "do not use this file"
        )
    return path.as_posix()


def _checked_size(name: str, num_bytes: int, archive: Path) -> None:
    if num_bytes > MAX_MEMBER_BYTES:
        raise ArchiveError(
            f"{archive.name}: member {name!r}: got {num_bytes} bytes, expected at most "
            f"{MAX_MEMBER_BYTES}; leave it out with an exclude pattern"
        )


@contextlib.contextmanager
def _open_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    if archive.suffix == ".deb":
        # The tool only converts: it writes the file tree of the package to a pipe.
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise ArchiveError(f"{archive.name}: dpkg-deb: {done.stderr.decode()[:200].strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            yield tar
    else:
        with tarfile.open(archive) as tar:
            yield tar


def read_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the wanted regular files of a .deb, .tgz, .tar.gz, .whl or .zip.

    Every path is checked, wanted or not, before anything is yielded; members in path order.
    """
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as bundle:
            entries = {_checked_name(i.filename, archive): i for i in bundle.infolist()}
            for name in sorted(entries):
                # The upper half of the attributes is the Unix mode; 0o120000 is a link.
                is_link = entries[name].external_attr >> 16 & 0o170000 == 0o120000
                if not entries[name].is_dir() and not is_link and wanted(name):
                    _checked_size(name, entries[name].file_size, archive)
                    yield name, bundle.read(entries[name])
        return
    with _open_tar(archive) as tar:
        members = {_checked_name(m.name, archive): m for m in tar.getmembers()}
        for name in sorted(members):
            if members[name].isreg() and wanted(name):
                _checked_size(name, members[name].size, archive)
                stream = tar.extractfile(members[name])
                yield name, stream.read() if stream else b""


def _unpacked(name: str, data: bytes, archive: Path) -> bytes:
    if not name.endswith((".gz", ".dz")):
        return data
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            plain = stream.read(MAX_MEMBER_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ArchiveError(f"{archive.name}: member {name!r}: not readable ({error})") from None
    _checked_size(name, len(plain), archive)
    return plain


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # The old texts are Latin-1, which reads any byte.
        return data.decode("latin-1")


def _dictionary(text: str) -> Iterator[str]:
    """Yield runs of whole entries (blank lines between them) of about 64k characters."""
    held: list[str] = []
    size = 0
    for entry in text.split("\n\n"):
        held.append(entry)
        size += len(entry) + 2
        if size >= DICTIONARY_DOCUMENT_CHARS:
            yield "\n\n".join(held)
            held, size = [], 0
    if held:
        yield "\n\n".join(held)


def read_documents(package: Package, archive: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document of a package, not yet cleaned, in path order."""

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, p) for p in package.include) and not any(
            fnmatch.fnmatchcase(name, p) for p in package.exclude
        )

    texts: dict[str, str] = {}
    for name, data in read_members(archive, wanted):
        texts[name] = _decoded(_unpacked(name, data, archive))
    if package.extractor == "wordnet":
        yield from wordnet_to_texts(texts)
        return
    for name, text in texts.items():
        if package.extractor == "html":
            yield name, html_to_text(text)
        elif package.extractor == "rst":
            yield name, rst_to_text(text)
        elif package.extractor == "tagged":
            yield name, tagged_to_text(text)
        elif package.extractor == "dictionary":
            for part, entries in enumerate(_dictionary(text)):
                yield f"{name}#{part}", entries
        else:
            yield name, text


def read_licence(package: Package, archive: Path) -> str:
    """Return the licence text that the package ships; raise ArchiveError if it does not."""
    for name, data in read_members(archive, lambda name: name == package.licence_file):
        return _decoded(_unpacked(name, data, archive))
    raise ArchiveError(
        f"{archive.name}: licence_file: no member {package.licence_file!r}; "
        "expected the licence beside the text"
    )

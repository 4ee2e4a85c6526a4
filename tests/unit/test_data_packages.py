"""The list of packages, and fetching with a tool that is played by the test."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from finwhale.data import fetch
from finwhale.data.fetch import (
    ArchiveError,
    FetchError,
    download_command,
    fetch_all,
    fetch_package,
    read_documents,
    read_licence,
    read_members,
    run_tool,
)
from finwhale.data.packages import PACKAGES, Package, PackageError, choose

CONTENT = b"the bytes of a package"


def _package(name: str = "one", content: bytes = CONTENT, **fields) -> Package:
    values = {
        "name": name,
        "registry": "npm",
        "package": f"@x/{name}",
        "version": "1.0",
        "file": f"x-{name}-1.0.tgz",
        "sha256": hashlib.sha256(content).hexdigest(),
        "licence": "MIT",
        "licence_file": "package/LICENSE",
        "tier": "A",
        "extractor": "text",
        "include": ("package/*.txt",),
        "why": "a test",
    }
    return Package(**{**values, **fields})


class FakeTool:
    """Writes the content given for a package; counts its calls."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents, self.calls = contents, []

    def __call__(self, command, folder: Path) -> None:
        wanted = command[-1]
        self.calls.append(wanted)
        name = wanted.removeprefix("@x/").removesuffix("@1.0")
        if name not in self.contents:
            raise FetchError(f"npm: no such package {wanted}")
        (folder / f"x-{name}-1.0.tgz").write_bytes(self.contents[name])


def test_list_is_pinned_unique_and_licensed():
    names = [package.name for package in PACKAGES]
    assert len(set(names)) == len(names)
    files = {(p.registry, p.file): p.sha256 for p in PACKAGES}
    assert all(files[p.registry, p.file] == p.sha256 for p in PACKAGES)
    assert len(set(files.values())) == len(files)


def test_only_permissive_sources_are_trained_on():
    for package in PACKAGES:
        is_copyleft = any(word in package.licence for word in ("GPL", "GFDL", "CC-BY-SA", "MPL"))
        assert is_copyleft is (package.tier == "B"), package.name
    trained = [p for p in PACKAGES if p.tier == "A" and not p.held_out]
    assert not any("spam" in pattern for p in trained for pattern in p.include)
    assert {p.extractor for p in PACKAGES if p.held_out} == {"html", "python"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tier": "C"}, "tier: got 'C'"),
        ({"registry": "hub"}, "registry: got 'hub'"),
        ({"extractor": "pdf"}, "extractor: got 'pdf'"),
        ({"sha256": "12"}, "sha256: got '12'"),
        ({"name": "../up"}, "name: got '../up'"),
        ({"file": "a/b.tgz"}, "file: got 'a/b.tgz'"),
        ({"include": ()}, "include, licence"),
        ({"licence_file": ""}, "include, licence"),
    ],
)
def test_record_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(PackageError, match=message):
        _package(**fields)


def test_choice_by_tier_and_name():
    packages = [_package("one"), _package("two", tier="B"), _package("three")]
    assert [p.name for p in choose(packages)] == ["one", "three"]
    assert [p.name for p in choose(packages, tiers=("A", "B"))] == ["one", "two", "three"]
    assert [p.name for p in choose(packages, only=("three",))] == ["three"]
    with pytest.raises(PackageError, match="only: got 'two'"):
        choose(packages, only=("two",))
    with pytest.raises(PackageError, match="tiers: got 'C'"):
        choose(packages, tiers=("C",))
    with pytest.raises(PackageError, match="no package is chosen"):
        choose(packages, tiers=())


@pytest.mark.parametrize(
    ("package", "command"),
    [
        (_package(), "npm pack --loglevel=error --pack-destination F @x/one@1.0"),
        (_package(registry="debian", package="d", version="1:2-3"), "apt-get download d=1:2-3"),
    ],
)
def test_download_command_names_version_and_no_host(package, command):
    found = download_command(package, Path("F"))
    assert found == command.split()
    assert not any("://" in part for part in found)


def test_pip_command_pins_the_wheel_or_the_source():
    wheel = download_command(_package(registry="pypi", package="w", file="w.whl"), Path("F"))
    source = download_command(_package(registry="pypi", package="w", file="w.tar.gz"), Path("F"))
    assert "w==1.0" in wheel
    assert "--no-deps" in wheel
    assert "--only-binary=:all:" in wheel
    assert "--no-binary=:all:" in source


def test_file_is_fetched_once(tmp_path):
    tool, said = FakeTool({"one": CONTENT}), []
    first = fetch_package(_package(), tmp_path, run=tool, progress=said.append)
    second = fetch_package(_package(), tmp_path, run=tool, progress=said.append)
    assert first == second
    assert first.read_bytes() == CONTENT
    assert len(tool.calls) == 1
    assert [line.split(":")[0] for line in said] == ["one", "one"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_wrong_bytes_are_refused_with_both_hashes_and_not_kept(tmp_path):
    wrong = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(FetchError) as caught:
        fetch_package(_package(), tmp_path, run=FakeTool({"one": b"other"}))
    message = str(caught.value)
    assert message.startswith("one: sha256 of x-one-1.0.tgz")
    assert wrong in message
    assert _package().sha256 in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damaged_file_in_the_cache_is_refused(tmp_path):
    file = fetch_package(_package(), tmp_path, run=FakeTool({"one": CONTENT}))
    file.write_bytes(CONTENT[:-1])
    with pytest.raises(FetchError, match=r"delete .* and fetch again"):
        fetch_package(_package(), tmp_path, run=FakeTool({"one": CONTENT}))


def test_missing_package_is_named_and_the_others_stay(tmp_path):
    packages = [_package("one"), _package("gone"), _package("two")]
    tool = FakeTool({"one": CONTENT, "two": CONTENT})
    with pytest.raises(FetchError, match=r"^gone: npm: no such package") as caught:
        fetch_all(packages, tmp_path, run=tool)
    assert "two" not in str(caught.value)
    kept = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["x-one-1.0.tgz", "x-two-1.0.tgz"]
    files = fetch_all(packages[::2], tmp_path, run=FakeTool({}))
    assert list(files) == ["one", "two"]


def test_file_of_another_version_is_refused(tmp_path):
    other = _package(file="x-one-2.0.tgz")
    with pytest.raises(FetchError, match=r"got .'x-one-1.0.tgz'., expected x-one-2.0.tgz"):
        fetch_package(other, tmp_path, run=FakeTool({"one": CONTENT}))


def test_missing_or_failing_tool_is_reported(tmp_path):
    with pytest.raises(FetchError, match="no-such-tool: no such program"):
        run_tool(["no-such-tool"], tmp_path)
    with pytest.raises(FetchError, match=r"^sh: ERROR: told so$"):
        run_tool(["sh", "-c", "echo 'ERROR: told so' >&2; echo later >&2; exit 3"], tmp_path)
    with pytest.raises(FetchError, match=r"^sh: last words$"):
        run_tool(["sh", "-c", "echo first; echo last words; exit 3"], tmp_path)
    with pytest.raises(FetchError, match=r"^sh: no output$"):
        run_tool(["sh", "-c", "exit 3"], tmp_path)


def _tar(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/a", "a\\..\\b"])
def test_path_that_leaves_the_archive_is_refused(tmp_path, name):
    tar = _tar(tmp_path / "a.tgz", {"good.txt": b"x", name: b"x"})
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as bundle:
        bundle.writestr("good.txt", "x")
        bundle.writestr(name, "x")
    for archive in (tar, tmp_path / "a.whl"):
        with pytest.raises(ArchiveError, match="expected a relative path"):
            list(read_members(archive, lambda name: name == "good.txt"))


def test_links_are_skipped_and_files_come_in_order(tmp_path):
    members = {"./b.txt": b"b", "a.txt": b"a", "c.bin": b"c"}
    tar = _tar(tmp_path / "a.tgz", members, {"l.txt": "/etc/passwd"})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as bundle:
        for name, data in members.items():
            bundle.writestr(name, data)
        link = zipfile.ZipInfo("l.txt")
        link.external_attr = 0o120777 << 16
        bundle.writestr(link, "/etc/passwd")
    for archive in (tar, tmp_path / "a.zip"):
        found = list(read_members(archive, lambda name: name.endswith(".txt")))
        assert found == [("a.txt", b"a"), ("b.txt", b"b")]


def test_member_above_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_MEMBER_BYTES", 10)
    at_limit = _tar(tmp_path / "a.tgz", {"package/a.txt": b"x" * 10})
    assert list(read_documents(_package(), at_limit)) == [("package/a.txt", "x" * 10)]
    above = _tar(tmp_path / "b.tgz", {"package/a.txt": b"x" * 11})
    bomb = _tar(tmp_path / "c.tgz", {"package/a.gz": gzip.compress(b"x" * 11)})
    for archive in (above, bomb):
        package = replace(_package(), include=("package/*",))
        with pytest.raises(ArchiveError, match="expected at most 10"):
            list(read_documents(package, archive))


def test_documents_follow_the_patterns_and_the_extractor(tmp_path):
    members = {
        "package/a.txt": "caf\u00e9".encode("latin-1"),
        "package/b.txt": "caf\u00e9".encode(),
        "package/skip.txt": b"no",
        "package/c.html": b"<p>x</p>",
        "package/d.gz": gzip.compress(b"entry one\n\nentry two"),
        "package/LICENSE": b"MIT text",
    }
    archive = _tar(tmp_path / "a.tgz", members)
    package = _package(exclude=("*/skip*",))
    found = dict(read_documents(package, archive))
    assert found == {"package/a.txt": "caf\u00e9", "package/b.txt": "caf\u00e9"}
    page = replace(package, extractor="html", include=("*.html",))
    assert [text.strip() for _, text in read_documents(page, archive)] == ["x"]
    words = replace(package, extractor="dictionary", include=("*.gz",))
    assert list(read_documents(words, archive)) == [("package/d.gz#0", "entry one\n\nentry two")]
    assert read_licence(package, archive) == "MIT text"
    with pytest.raises(ArchiveError, match="no member 'other'"):
        read_licence(replace(package, licence_file="other"), archive)


def test_dictionary_is_cut_between_entries(tmp_path):
    entries = [f"word{n}\n   meaning" for n in range(9_000)]
    archive = _tar(tmp_path / "a.tgz", {"package/a.txt": "\n\n".join(entries).encode()})
    package = _package(extractor="dictionary")
    parts = [text for _, text in read_documents(package, archive)]
    assert len(parts) == 3  # 9,000 entries of about 21 characters in parts of 65,536
    assert [entry for part in parts for entry in part.split("\n\n")] == entries


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not a Debian machine")
def test_debian_package_is_read_without_unpacking(tmp_path):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: d\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: test\n"
    (tree / "DEBIAN" / "control").write_text(control)
    (tree / "usr").mkdir()
    (tree / "usr" / "a.txt").write_text("text")
    (tree / "usr" / "l.txt").symlink_to("/etc/passwd")
    command = ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(tmp_path / "d.deb")]
    subprocess.run(command, check=True, capture_output=True)
    found = list(read_members(tmp_path / "d.deb", lambda name: name.endswith(".txt")))
    assert found == [("usr/a.txt", b"text")]
    (tmp_path / "broken.deb").write_bytes(b"no package")
    with pytest.raises(ArchiveError, match=r"broken\.deb: dpkg-deb:"):
        list(read_members(tmp_path / "broken.deb", lambda name: True))

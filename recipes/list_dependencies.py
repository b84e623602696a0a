"""Write docs/dependencies.md: every package that blips can pull in, its version and licence.

python recipes/list_dependencies.py --output docs/dependencies.md
"""

import argparse
import re
import tomllib
from importlib.metadata import PackageNotFoundError, files, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement

LONGEST = 60
PHRASES = {
    "Permission is hereby granted, free of charge, to any person obtaining a copy": "MIT",
    "Apache License Version 2.0": "Apache-2.0",
}
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
TITLE = """\
# Dependencies and their licences

Made by `make audit` from the installed packages; an extra that is not installed where the list is
made is missing from it. "for" is blips itself or the extras that need a package, directly or
through others.

`make audit` also checks every pinned version for known vulnerabilities with `pip-audit --strict`,
which needs network access.

| package | version | licence | for |
|---|---|---|---|
"""


def licence(name: str) -> str:
    """Return what a package says about its licence."""
    about = metadata(name)
    expression = about.get("License-Expression")
    if expression:
        return expression
    classifiers = [
        line.split("::")[-1].strip()
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    if classifiers:
        return "; ".join(sorted(set(classifiers)))
    lines = (about.get("License") or "UNKNOWN").strip().splitlines()
    return lines[0][:LONGEST] if lines[0] != "UNKNOWN" else _from_file(name)


def _from_file(name: str) -> str:
    """Find the licence by the words of its file, where the package names none."""
    for path in files(name) or []:
        if "licen" in path.name.lower():
            text = " ".join(path.read_text().split())
            for phrase, found in PHRASES.items():
                if phrase in text:
                    return f"{found} (its file)"
    return "not stated"


def closure(texts: list[str], extras: frozenset[str], found: dict[str, str]) -> None:
    """Add the installed packages that these requirements of a package with extras need."""
    for text in texts:
        requirement = Requirement(text)
        marker = requirement.marker
        wanted = marker is None or any(
            marker.evaluate({"extra": extra}) for extra in (extras or frozenset({""}))
        )
        child = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if not wanted or child in found:
            continue
        try:
            version = metadata(requirement.name)["Version"]
        except PackageNotFoundError:
            continue
        found[child] = version
        more = requires(requirement.name) or []
        closure(more, frozenset(requirement.extras) or frozenset({""}), found)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="List dependencies and licences.")
    parser.add_argument("--output", type=Path, default=Path("docs/dependencies.md"))
    options = parser.parse_args()
    users: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    project = tomllib.loads(PROJECT.read_text())["project"]
    needs = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra in sorted(needs):
        found: dict[str, str] = {}
        own = [text for text in needs[extra] if not text.startswith("blips-mlip[")]
        closure(own, frozenset({""}), found)
        versions |= found
        for name in found:
            if "blips" not in users.setdefault(name, []):
                users[name].append(extra or "blips")
    rows = [
        f"| {name} | {versions[name]} | {licence(name)} | {', '.join(users[name])} |"
        for name in sorted(versions)
    ]
    options.output.write_text(TITLE + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

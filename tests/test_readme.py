"""The README's first screen: short, and its code runs as printed."""

import re
import tomllib
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_first_code_is_short_and_ends_in_an_energy_with_its_sigma(
    tmp_path, monkeypatch, capsys
):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    lines = [line for line in code.group(1).splitlines() if line.strip()]
    assert len(lines) <= 25
    monkeypatch.chdir(tmp_path)
    exec(compile(code.group(1), "README.md", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(r"E = (-?\d+\.\d+) ± (\d+\.\d+) eV", last)
    assert match is not None
    assert float(match.group(2)) > 0


def test_the_commands_named_exist():
    for command in ("make demo", "make test"):
        assert command in README
    targets = (Path(__file__).parents[1] / "Makefile").read_text()
    assert re.search(r"^demo:", targets, re.MULTILINE)
    assert re.search(r"^test:", targets, re.MULTILINE)


def test_every_extra_is_named():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["name"] in README
    for extra in project["optional-dependencies"]:
        assert re.search(rf"`{extra}`|\.\[{extra}\]", README), extra

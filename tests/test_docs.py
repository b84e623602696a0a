"""The documentation: its Python runs as printed, and the site builds without a warning.

Blocks of one page share their names, in order, in a temporary folder that holds what the first page
leaves behind. `<!-- needs: package -->` before a block skips it where the package is missing,
`<!-- not run: reason -->` always.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from matplotlib.image import imread

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>needs|not run): (?P<what>[^>]*?) -->\n)?```python\n(?P<code>.*?)```",
    re.DOTALL,
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FIRST = "index.md"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text()))
ELSEWHERE = {"add-your-own-model.md"}  # tests/backbones/test_generic.py


def run_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the blocks of a page; the number of those that ran."""
    text = (DOCS / name).read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    monkeypatch.chdir(folder)
    count = 0
    for match in BLOCK.finditer(text):
        missing = match["mark"] == "needs" and not importlib.util.find_spec(match["what"])
        if missing or match["mark"] == "not run":
            continue
        line = text[: match.start("code")].count("\n")
        code = "\n" * line + match["code"]  # errors point into the page
        exec(compile(code, str(DOCS / name), "exec"), names)
        count += 1
    return count


@pytest.fixture(scope="session")
def first_page(tmp_path_factory):
    """What a reader of the first page has on disk."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_page(FIRST, folder, monkeypatch) > 2
    return folder


def test_the_first_page_leaves_a_conditioned_model(first_page, capsys):
    import blips

    assert blips.load(first_page / "ammonia.safetensors").posterior is not None


SLOW = {"simulation.md"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(set(PAGES) - {FIRST} - ELSEWHERE)
    ],
)
def test_python_of_the_pages_runs(name, first_page, tmp_path, monkeypatch):
    shutil.copy(first_page / "ammonia.safetensors", tmp_path)
    if "chgnet" in (DOCS / name).read_text():
        pytest.importorskip("chgnet")
    run_page(name, tmp_path, monkeypatch)


def test_every_page_with_code_is_run_somewhere():
    assert {FIRST, "simulation.md", "train.md"} <= set(PAGES)
    assert set(PAGES) >= ELSEWHERE


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built strictly; notebooks without their outputs."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    settings = {"BLIPS_DOCS_EXECUTE": "0", "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_has_every_page(site):
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page.name
    reference = (site / "api" / "potential.html").read_text()
    assert "blips.potential.BayesianPotential.predict" in reference


def test_formulas_are_mathml_and_nothing_is_loaded_from_outside(site):
    concepts = (site / "concepts.html").read_text()
    assert concepts.count("<math") > 10
    assert "\\alpha" not in re.sub(r"<[^>]*>", "", concepts)
    loaded = r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:)?//'
    for page in site.rglob("*.html"):
        found = re.search(loaded, page.read_text())
        assert found is None, (page.name, found and found.group(0))


def test_results_are_those_of_the_repository(site):
    page = re.sub(r"<[^>]*>", "", (site / "error-bars.html").read_text())
    table = (REPOSITORY / "results" / "errorbars" / "default" / "table.md").read_text()
    cells = {cell.strip() for row in table.splitlines() if "|" in row for cell in row.split("|")}
    numbers = {cell for cell in cells if re.fullmatch(r"-?[\d.]+ ± [\d.]+", cell)}
    assert len(numbers) > 50
    assert all(number in page for number in numbers)


LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize(
    "page",
    sorted([*REPOSITORY.glob("studies/**/README.md"), REPOSITORY / "benchmarks" / "README.md"]),
    ids=lambda page: page.parent.name,
)
def test_links_of_notes_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address(site):
    """Where the site is served."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
@pytest.mark.parametrize("page", ["index.html", "concepts.html"])
def test_chromium_shows_the_page_without_errors(page, address, tmp_path):
    picture = tmp_path / "page.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1000"]
    command += ["--enable-logging=stderr", f"--screenshot={picture}", f"{address}/{page}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert picture.exists(), shown.stderr
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in console if re.search("error|refused", line, re.IGNORECASE)]
    pixels = imread(picture)
    assert pixels.shape[:2] == (1000, 1280)
    assert pixels[..., :3].std() > 0.05, "a blank page"

"""The notebooks run from a clean start, and are kept without outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
NEEDS = {"2-error-bars-for-a-released-model.ipynb": "chgnet"}


def test_there_are_three_without_outputs():
    assert len(NOTEBOOKS) == 3
    for name in NOTEBOOKS:
        for cell in nbformat.read(FOLDER / name, as_version=4).cells:
            assert not cell.get("outputs"), name
            assert cell.get("execution_count") is None, name


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the packages that run it
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    ).execute()
    texts = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stdout"
    ]
    assert any("±" in text or "interval" in text for text in texts)


SLOW = """
import time
from blips import progress
texts = []
show = progress.Bars._in_notebook
progress.Bars._in_notebook = lambda self, text: (texts.append(text), show(self, text))
progress.DELAY = progress.BETWEEN_UPDATES = 0.05
with progress.progress_shown():
    for _ in progress.track(range(10), "predicting", 10):
        time.sleep(0.03)
print(texts)
"""


@pytest.mark.filterwarnings("default")  # of the packages that run it
def test_notebooks_show_the_time_left_without_widgets():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SLOW)])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    line, printed = notebook.cells[0].outputs
    assert line["data"] == {"text/plain": ""}  # removed at the end
    assert "of 10, about 0 s left" in printed["text"]

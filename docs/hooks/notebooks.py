"""Pages of the notebooks, executed as the site is built.

A notebook in git has no outputs. It is executed once for each of its contents, and the executed
copy is kept in `build/notebooks`; BLIPS_DOCS_EXECUTE=0 shows those without a copy as they are.
"""

import base64
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
EXECUTED = ROOT / "build" / "notebooks"


def on_config(config: Any, **_: Any) -> Any:
    """Add a page of each notebook to the navigation."""
    pages = [{title(path): f"notebooks/{path.stem}.md"} for path in sorted(FOLDER.glob("*.ipynb"))]
    for section in config.nav:
        if "Notebooks" in section:
            section["Notebooks"] = pages
    config.nav = [section for section in config.nav if section != {"Notebooks": []}]
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages, and the images on them."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, images = page(path, outputs_of(path))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def title(path: Path) -> str:
    """First heading."""
    for line in nbformat.read(path, as_version=4).cells[0].source.splitlines():
        if line.startswith("# "):
            return line[2:]
    return path.stem


def outputs_of(path: Path) -> Any:
    """Run the notebook; return it with its outputs."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    kept = EXECUTED / f"{path.stem}-{digest}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    if os.environ.get("BLIPS_DOCS_EXECUTE", "1") != "0":
        EXECUTED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(
                notebook, timeout=600, kernel_name="python3", resources=resources
            ).execute()
        nbformat.write(notebook, kept)
    return notebook


def page(path: Path, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook, and its images by name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(shown(output)[0] for output in cell.outputs)
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell.outputs:
            _, image = shown(output)
            if image is not None:
                name = f"{path.stem}-{len(images)}.png"
                images[name] = image
                parts.append(f"![output {len(images)} of this notebook]({name})")
    parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts), images


def shown(output: Any) -> tuple[str, bytes | None]:
    """Text and image of one output; progress and warnings (stderr) are left out."""
    if output.output_type == "stream":
        return (output.text if output.name == "stdout" else ""), None
    data = output.get("data", {})
    if "image/png" in data:
        return "", base64.b64decode(data["image/png"])
    return data.get("text/plain", ""), None

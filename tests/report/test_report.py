"""What a report says, and that nothing in it can speak for itself."""

import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

import blips.report
from blips.cli import app
from blips.errors import InputError
from blips.report import write_report
from blips.report.document import _digest, policy, resource
from helpers import morse_ammonia

QUICK = {"samples": 8, "bootstrap": 20}


class Page(HTMLParser):
    """Tags, their attributes, and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text = [], [], ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_comment(self, data):
        self.comment = data

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def page(fit_run, tmp_path_factory):
    file = write_report(fit_run, tmp_path_factory.mktemp("page") / "report.html", **QUICK)
    return Page(file.read_text())


def test_the_page_has_metrics_plots_structures_settings_and_provenance(page):
    data = json.loads(page.scripts[0])
    (found,) = data["sets"]
    assert found["name"] == "validation"
    assert set(found["plots"]) == {
        "parity_energy", "parity_forces", "reliability", "rejection", "std_error",
    }  # fmt: skip
    assert [s["std_max"] for s in found["structures"]] == sorted(
        (s["std_max"] for s in found["structures"]), reverse=True
    )
    assert len(data["figures"]["training-plot"]["series"][0]["x"]) == 3
    for text in ("Force MAE", "bootstrap", "epochs: 3", "edge rows", "torch 2.", "chose the check"):
        assert text in page.text


def test_numbers_are_those_of_the_model(page, fit_run):
    (found,) = json.loads(page.scripts[0])["sets"]
    structures = ase.io.read(fit_run.parent / "valid.extxyz", ":")
    prediction = blips.load(fit_run / "best.safetensors").predict(structures, samples=8)
    series = found["plots"]["parity_forces"]["series"][0]
    assert series["y"] == pytest.approx(prediction.forces.ravel(), rel=1e-4, abs=1e-7)
    assert series["std"] == pytest.approx(prediction.forces_total_std.ravel(), rel=1e-4, abs=1e-7)
    for entry in found["structures"]:
        expected = np.linalg.norm(prediction[entry["index"]].forces_total_std, axis=1)
        assert entry["std"] == pytest.approx(expected, rel=1e-3)


def test_names_are_escaped_and_only_our_scripts_may_run(page):
    names = [tag for tag, _ in page.tags]
    assert "b" not in names  # the folder is called <b>run&amp
    assert "Run <b>run&amp" in page.text
    allowed = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert allowed.startswith("default-src 'none'")
    assert "unsafe" not in allowed
    for script in page.scripts[1:]:
        assert f"'sha256-{_digest(script)}'" in allowed
    assert len(page.scripts) == 4


def test_nothing_is_loaded_from_elsewhere(page):
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "style", "onclick", "onload"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)


def test_every_image_has_words_and_every_control_a_name(page):
    for tag, attributes in page.tags:
        if attributes.get("role") == "img":
            assert attributes["aria-label"]
        if tag == "svg":
            assert attributes.get("tabindex") == "0"
    assert any(tag == "html" and a["lang"] == "en" for tag, a in page.tags)
    headings = [tag for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert headings.count("h1") == 1


def test_the_embedded_viewer_is_the_published_one(page):
    folder = Path(blips.report.__file__).parent / "vendor"
    digest = hashlib.sha256((folder / "3Dmol-min.js").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
    assert "University of Pittsburgh" in (folder / "3Dmol-LICENSE.txt").read_text()
    assert "without specific prior written permission" in page.comment  # its licence goes along


def test_policy_names_exactly_these_texts():
    assert policy(["a"], "b").count("sha256-") == 2
    assert "</script" not in resource("page/plot.js") + resource("page/report.js")


def test_the_command_takes_other_structures(fit_run, tmp_path):
    ase.io.write(tmp_path / "test.extxyz", morse_ammonia(3, seed=5))
    output = tmp_path / "out.html"
    arguments = ["report", fit_run, "-o", output, "--structures", tmp_path / "test.extxyz"]
    arguments += ["--samples", 4, "--bootstrap", 10]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "report in" in result.output
    (found,) = json.loads(Page(output.read_text()).scripts[0])["sets"]
    assert found["name"] == "test"
    assert len(found["structures"]) == 3


def test_a_model_alone_is_reported_on_given_structures(fit_run, tmp_path):
    ase.io.write(tmp_path / "at 300 K.extxyz", morse_ammonia(3, seed=5))
    model = tmp_path / "model.safetensors"
    model.write_bytes((fit_run / "best.safetensors").read_bytes())
    given = {"structures": [tmp_path / "at 300 K.extxyz"], **QUICK}
    page = Page(write_report(model, tmp_path / "report.html", **given).read_text())
    assert "at 300 K: 3 structures, all with energies and forces." in page.text
    for sentence in (
        "Forces are off by",
        "Energies are off by",
        "% lie within their 90 % interval",
    ):
        assert sentence in page.text
    inside = Page(
        write_report(fit_run / "best.safetensors", tmp_path / "b.html", **QUICK).read_text()
    )
    assert json.loads(inside.scripts[0])["sets"][0]["name"] == "validation"  # those of its run


def test_a_run_shows_its_calibrated_model_first(fit_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(fit_run, run)
    potential = blips.load(run / "best.safetensors")
    blips.calibrate(potential, fit_run.parent / "valid.extxyz", samples=4)
    blips.save(potential, run / "calibrated.safetensors")
    page = Page(write_report(run, tmp_path / "report.html", **QUICK).read_text())
    assert "calibrated for energy, forces" in page.text
    assert "calibrated.safetensors" in page.text


@pytest.mark.parametrize("beside", [False, True])
def test_predictions_are_reported_with_labels_and_without(fit_run, tmp_path, beside):
    frames = morse_ammonia(4, seed=5)
    prediction = blips.load(fit_run / "best.safetensors").predict(frames)
    predicted = prediction.to_atoms(frames)
    if beside:  # labels keep their names, predictions have others
        for atoms, label in zip(predicted, frames, strict=True):
            atoms.info["predicted_energy"] = atoms.get_potential_energy()
            atoms.arrays["predicted_forces"] = atoms.get_forces()
            atoms.calc = label.calc
    file = tmp_path / "predicted.extxyz"
    ase.io.write(file, predicted)
    page = Page(write_report(file, tmp_path / "report.html", **QUICK).read_text())
    (found,) = json.loads(page.scripts[0])["sets"]
    largest = np.linalg.norm(prediction.forces_total_std, axis=1).max()
    assert found["std_max"] == pytest.approx(largest, rel=1e-3)
    if beside:
        error = np.abs(prediction.energy - [a.get_potential_energy() for a in frames]).mean()
        assert f"({error:.3g} eV a structure)" in page.text
        assert "parity_forces" in found["plots"]
    else:
        assert set(found["plots"]) == {"std_force"}
        assert "has labels: its errors are not known" in page.text
    ase.io.write(tmp_path / "labelled.extxyz", frames)
    given = {"structures": [tmp_path / "labelled.extxyz"], **QUICK}
    page = Page(write_report(file, tmp_path / "report.html", **given).read_text())
    assert "4 structures, all with energies and forces" in page.text
    ase.io.write(tmp_path / "labelled.extxyz", frames[1:])
    with pytest.raises(InputError, match="are not those of"):
        write_report(file, tmp_path / "report.html", **given)


def test_a_run_on_structures_in_memory_has_a_report_without_predictions(fit_run, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("best.safetensors", "metrics.csv"):
        (run / name).write_bytes((fit_run / name).read_bytes())
    page = Page(write_report(run, tmp_path / "report.html").read_text())
    assert json.loads(page.scripts[0])["sets"] == []
    assert "--structures test.extxyz" in page.text


def test_mistakes_name_the_remedy_and_write_nothing(tmp_path):
    output = tmp_path / "report.html"
    with pytest.raises(InputError, match="not there"):
        write_report(tmp_path / "absent", output)
    ase.io.write(tmp_path / "plain.extxyz", morse_ammonia(1, seed=0))
    with pytest.raises(InputError, match="no forces_uncertainty"):
        write_report(tmp_path / "plain.extxyz", output)
    with pytest.raises(InputError, match="folder of a blips run"):
        write_report(tmp_path, output)
    assert not output.exists()

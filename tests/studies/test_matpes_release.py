import gzip
import json

import numpy as np
import pytest
from ase import units
from ase.build import bulk
from ase.calculators.emt import EMT

from blips.data.labels import extract
from blips.errors import InputError
from studies.matpes import release
from studies.matpes.release import iter_entries, iter_matpes, read_matpes

MATRIX = [[3.0, 0.1, 0.0], [0.0, 3.5, 0.2], [0.3, 0.0, 4.0]]


def entry(number: int = 0, **changes) -> dict:
    sites = [
        {"species": [{"element": "Sr", "occu": 1}], "abc": [0.0, 0.0, 0.0], "label": "Sr"},
        {"species": [{"element": "Cd", "occu": 1}], "abc": [0.5, 0.25, 0.5], "label": "Cd"},
    ]
    return {
        "builder_meta": {"emmet_version": "0.84"},
        "nsites": 2,
        "structure": {
            "@module": "pymatgen.core.structure",
            "@class": "Structure",
            "charge": 0,
            "lattice": {"matrix": MATRIX, "pbc": [True, True, True], "a": 3.0},
            "sites": sites,
        },
        "energy": -34.9 - number,
        "forces": [[0.28, 0.39, 0.28], [-0.28, -0.39, -0.28]],
        "stress": [-3.7, 45.5, -9.5, -0.8, 30.2, -29.0],
        "matpes_id": f"matpes-20240214_30496_{number}",
        "functional": "PBE",
        "bandgap": None,
        "provenance": {"original_mp_id": "mp-30496", "md_step": 726},
    } | changes


def write(path, entries, form):
    lines = [json.dumps(one) for one in entries]
    text = "\n".join(lines) + "\n" if form == "lines" else "[" + ", ".join(lines) + "]"
    if form == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(json.dumps(entries, indent=2) if form == "indented" else text)
    return path


@pytest.mark.parametrize("form", ["list", "indented", "lines", "gzip"])
@pytest.mark.parametrize("chunk", [7, 1000, 1 << 20])
def test_all_forms_give_the_entries(tmp_path, monkeypatch, form, chunk):
    monkeypatch.setattr(release, "CHUNK", chunk)
    entries = [entry(number) for number in range(5)]
    path = write(tmp_path / "MatPES.json", entries, form)
    assert list(iter_entries(path)) == entries


def test_structure_and_labels(tmp_path):
    (atoms,) = read_matpes(write(tmp_path / "m.json", [entry()], "list"))
    assert atoms.get_chemical_symbols() == ["Sr", "Cd"]
    np.testing.assert_allclose(atoms.cell.array, MATRIX)
    np.testing.assert_allclose(atoms.positions[1], np.dot([0.5, 0.25, 0.5], MATRIX))
    assert atoms.pbc.all()
    assert atoms.info["original_mp_id"] == "mp-30496"
    assert atoms.info["matpes_id"] == "matpes-20240214_30496_0"
    assert "bandgap" not in atoms.info
    found = extract(atoms, ("energy", "forces", "stress"))
    assert found["energy"] == -34.9
    assert found["forces"][1, 1] == -0.39
    kbar = 0.1 * units.GPa
    assert found["stress"][0, 0] == pytest.approx(3.7 * kbar)
    assert found["stress"][1, 2] == pytest.approx(0.8 * kbar)  # yz
    assert found["stress"][0, 1] == pytest.approx(29.0 * kbar)  # xy


def test_a_compressed_crystal_has_the_sign_of_ase(tmp_path):
    """VASP reports a compressed crystal with positive, ASE with negative stress."""
    atoms = bulk("Cu", a=3.5)
    atoms.calc = EMT()
    assert atoms.get_stress()[0] < 0
    vasp_kbar = (-atoms.get_stress() / (0.1 * units.GPa)).tolist()
    (read,) = read_matpes(write(tmp_path / "m.json", [entry(stress=vasp_kbar)], "list"))
    np.testing.assert_allclose(read.get_stress(), atoms.get_stress())


def test_cartesian_sites_and_absent_labels(tmp_path):
    one = entry(forces=None, stress=None)
    for site, xyz in zip(one["structure"]["sites"], [[0, 0, 0], [1.5, 1, 2]], strict=True):
        del site["abc"]
        site["xyz"] = xyz
    (atoms,) = read_matpes(write(tmp_path / "m.json", [one], "list"))
    np.testing.assert_allclose(atoms.positions[1], [1.5, 1, 2])
    assert atoms.calc.results == {"energy": -34.9}


def test_reading_stops_at_the_limit(tmp_path):
    path = write(tmp_path / "m.json", [entry(n) for n in range(5)], "list")
    path.write_text(path.read_text()[:-500])
    assert len(read_matpes(path, limit=3)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-200], "entry 2: .*damaged or cut off"),
        (lambda text: text[:-1], "entry 3: .*cut off"),
        (lambda text: text.replace('"energy"', "energy", 1), "entry 0: .*damaged"),
        (lambda text: "[1, 2]", "entry 0: .*expected a JSON object"),
        (lambda text: "[]", "no structures"),
        (lambda text: "", "no structures"),
    ],
)
def test_damage_is_located(tmp_path, change, message):
    path = write(tmp_path / "m.json", [entry(n) for n in range(3)], "list")
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=rf"m\.json.*{message}"):
        read_matpes(path)


def test_damaged_gzip_is_located(tmp_path):
    path = write(tmp_path / "m.json.gz", [entry(n) for n in range(3)], "gzip")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="entry"):
        read_matpes(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_matpes(tmp_path / "none.json")


def mixed_site() -> dict:
    one = entry()
    one["structure"]["sites"][0]["species"] = [
        {"element": "Sr", "occu": 0.5},
        {"element": "Ca", "occu": 0.5},
    ]
    return one


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (mixed_site(), "partial occupancy"),
        (entry(structure={}), "lattice"),
        (entry(forces=[[0, 0, 0]]), "forces"),
        (entry(stress=[1, 2, 3]), "six components"),
        (entry(energy="low"), "low"),
    ],
)
def test_bad_entries_are_named(tmp_path, bad, message):
    path = write(tmp_path / "m.json", [entry(), bad | {"matpes_id": "the-bad-one"}], "list")
    with pytest.raises(InputError, match=rf"entry 1 \(the-bad-one\): .*{message}"):
        list(iter_matpes(path))

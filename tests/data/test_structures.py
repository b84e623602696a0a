import gzip
from itertools import pairwise
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from hypothesis import given
from hypothesis import strategies as st

from blips.data.structures import (
    check_structures,
    iter_structures,
    read_structures,
    xyz_frame_offsets,
)
from blips.errors import InputError
from blips.files import replacing
from blips.prediction import Prediction


def labelled(count: int, seed: int = 0) -> list[Atoms]:
    rng = np.random.default_rng(seed)
    frames = []
    for number in range(count):
        atoms = molecule(["NH3", "H2O", "CH4"][number % 3])
        atoms.rattle(0.05, rng=rng)
        forces = rng.normal(size=(len(atoms), 3)).round(8)
        atoms.calc = SinglePointCalculator(atoms, energy=float(number), forces=forces)
        frames.append(atoms)
    return frames


@pytest.fixture
def xyz(tmp_path: Path) -> Path:
    path = tmp_path / "frames.extxyz"
    ase.io.write(path, labelled(5))
    return path


@pytest.mark.parametrize("suffix", ["extxyz", "xyz", "traj", "db", "json", "extxyz.gz"])
def test_formats_of_ase_are_read(tmp_path, suffix):
    path = tmp_path / f"frames.{suffix}"
    frames = labelled(3)
    if suffix == "extxyz.gz":
        with gzip.open(path, "wt") as file:
            ase.io.write(file, frames, format="extxyz")
    else:
        ase.io.write(path, frames)
    structures = read_structures(path)
    assert [len(atoms) for atoms in structures] == [4, 3, 5]
    assert [atoms.get_potential_energy() for atoms in structures] == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(structures[2].get_forces(), frames[2].get_forces(), atol=1e-8)


@pytest.mark.parametrize("suffix", ["extxyz", "traj"])
@pytest.mark.parametrize(
    ("index", "expected"),
    [(":", [0, 1, 2, 3, 4]), ("::2", [0, 2, 4]), ("-2:", [3, 4]), (-1, [4]), (slice(1, 3), [1, 2])],
)
def test_index_means_what_it_means_in_ase(tmp_path, suffix, index, expected):
    path = tmp_path / f"frames.{suffix}"
    ase.io.write(path, labelled(5))
    energies = [atoms.get_potential_energy() for atoms in read_structures(path, index)]
    assert energies == expected


def test_reading_streams(xyz):
    frames = iter_structures(xyz)
    assert next(frames).get_potential_energy() == 0.0
    assert next(frames).get_potential_energy() == 1.0


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=8), blank=st.booleans())
def test_frame_offsets_cut_the_file_into_its_frames(tmp_path_factory, counts, blank):
    path = tmp_path_factory.mktemp("offsets") / "frames.xyz"
    blocks = [f"{n}\n\n" + "H 0 0 0\n" * n for n in counts]
    path.write_text(("\n" if blank else "").join(blocks))
    offsets = xyz_frame_offsets(path)
    content = path.read_text()
    cut = [content[a:b] for a, b in pairwise(offsets)]
    assert [piece.lstrip("\n").split("\n")[0] for piece in cut] == [str(n) for n in counts]


def test_cell_vectors_written_as_atoms_are_read(tmp_path):
    path = tmp_path / "cell.xyz"
    path.write_text("1\nfirst\nH 0 0 0\nVEC1 3 0 0\nVEC2 0 3 0\nVEC3 0 0 3\n" * 2)
    structures = read_structures(path)
    assert [atoms.get_volume() for atoms in structures] == pytest.approx([27.0, 27.0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "empty"),
        (lambda text: "\n\n", "no frames"),
        (lambda text: text[: text.rindex("\n", 0, -40)], r"frame 4: ends after \d of 3 atoms"),
        (lambda text: text.replace("\n5\n", "\nfive\n"), "frame 2: expected the number of atoms"),
        (lambda text: text.replace("\n5\n", "\n99999999999\n"), "frame 2: ends after"),
        (lambda text: text.replace("\nC ", "\nC *** "), "frame 2: cannot be read"),
        (lambda text: text.replace("\nC ", "\nQq "), "frame 2: cannot be read"),
    ],
)
def test_damaged_xyz_names_file_and_frame(xyz, damage, message):
    xyz.write_text(damage(xyz.read_text()))
    with pytest.raises(InputError, match=rf"frames\.extxyz.*{message}"):
        read_structures(xyz)


def test_other_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_structures(tmp_path / "none.xyz")
    path = tmp_path / "noise.traj"
    path.write_bytes(b"- of Ulm" + bytes(40))
    with pytest.raises(InputError, match=r"noise\.traj, frame 0: cannot be read"):
        read_structures(path)
    unknown = tmp_path / "notes.abc"
    unknown.write_text("no structure here")
    with pytest.raises(InputError, match=r"notes\.abc.*cannot be read"):
        read_structures(unknown)


def test_index_outside_the_file_is_refused(xyz):
    with pytest.raises(InputError, match="no frame 9; it has 5"):
        read_structures(xyz, 9)
    with pytest.raises(InputError, match="no structures at index"):
        read_structures(xyz, "7:")


def test_good_structures_pass_the_check():
    frames = [*labelled(3), bulk("Cu"), Atoms("He")]
    assert check_structures(iter(frames), "file") == frames


def nan_position() -> Atoms:
    atoms = molecule("H2O")
    atoms.positions[1, 2] = np.nan
    return atoms


def infinite_force() -> Atoms:
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=0.0, forces=np.full((3, 3), np.inf))
    return atoms


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (Atoms(), "no atoms"),
        (nan_position(), "positions hold NaN"),
        (infinite_force(), r"forces.*NaN or infinity"),
        (Atoms("HX", [[0, 0, 0], [1, 0, 0]]), "unknown elements X"),
        (Atoms("H", pbc=True), "not independent"),
        (Atoms("H", cell=[[3, 0, 0], [3, 0, 0], [0, 0, 3]], pbc=[1, 1, 0]), "not independent"),
        (Atoms("H2", [[0, 0, 0], [0, 0, 0.05]]), "atoms 0 and 1 are 0.05 A apart"),
        (Atoms("H2", [[0, 0, 0], [0, 0, 9.95]], cell=[10] * 3, pbc=True), "0.05 A apart"),
        (Atoms("H", cell=[9, 9, 0.05], pbc=True), "atoms 0 and 0"),
    ],
)
def test_each_problem_is_found_with_its_frame(atoms, message):
    with pytest.raises(InputError, match=rf"data\.xyz, frame 1: .*{message}"):
        check_structures([molecule("H2O"), atoms], "data.xyz")


def test_atoms_of_a_molecule_in_a_box_have_no_images():
    check_structures([Atoms("H2", [[0, 0, 0], [0, 0, 9.95]], cell=[10] * 3, pbc=False)])


def test_elements_outside_the_model_are_named():
    frames = [molecule("H2O"), molecule("CH3Cl")]
    check_structures(frames, elements=[1, 8, 6, 17])
    with pytest.raises(InputError, match="frame 1: unknown elements C, Cl"):
        check_structures(frames, elements=(1, 8))


def test_problems_are_collected_up_to_a_bound():
    with pytest.raises(InputError) as caught:
        check_structures([Atoms()] * 3, "few")
    assert str(caught.value).count("no atoms") == 3
    with pytest.raises(InputError, match="perhaps more") as caught:
        check_structures([Atoms()] * 30, "many")
    assert str(caught.value).count("no atoms") == 10
    with pytest.raises(InputError, match="nothing: no structures"):
        check_structures([], "nothing")


def prediction_for(frames: list[Atoms], stress: bool) -> Prediction:
    rng = np.random.default_rng(1)
    atoms, size = sum(map(len, frames)), len(frames)
    symmetric = rng.normal(size=(size, 3, 3))
    symmetric = symmetric + symmetric.transpose(0, 2, 1)
    return Prediction(
        n_atoms=np.array([len(frame) for frame in frames]),
        method="mc",
        samples=8,
        energy=rng.normal(size=size),
        energy_std=rng.random(size),
        energies=rng.normal(size=atoms),
        energies_std=rng.random(atoms),
        forces=rng.normal(size=(atoms, 3)),
        forces_std=rng.random((atoms, 3)),
        stress=symmetric if stress else None,
        stress_std=np.abs(symmetric) if stress else None,
    )


def test_written_predictions_are_read_back(tmp_path):
    frames = [bulk("Cu", cubic=True), bulk("NaCl", "rocksalt", a=5.6)]
    frames[0].info |= {"energy": 99.0, "origin": "test"}
    frames[1].calc = SinglePointCalculator(frames[1], energy=77.0)
    prediction = prediction_for(frames, stress=True)
    ase.io.write(tmp_path / "out.extxyz", prediction.to_atoms(frames))
    first = 0
    for number, atoms in enumerate(ase.io.read(tmp_path / "out.extxyz", index=":")):
        rows = slice(first, first + len(atoms))
        first += len(atoms)
        assert atoms.get_potential_energy() == prediction.energy[number]
        np.testing.assert_allclose(atoms.get_forces(), prediction.forces[rows], atol=1e-8)
        np.testing.assert_allclose(atoms.get_stress(voigt=False), prediction.stress[number])
        np.testing.assert_allclose(
            atoms.calc.results["energies"], prediction.energies[rows], atol=1e-8
        )
        assert atoms.info["energy_uncertainty"] == prediction.energy_std[number]
        np.testing.assert_allclose(
            atoms.info["stress_uncertainty"],
            full_3x3_to_voigt_6_stress(prediction.stress_std[number]),
        )
        np.testing.assert_allclose(
            atoms.arrays["forces_uncertainty"], prediction.forces_std[rows], atol=1e-8
        )
        np.testing.assert_allclose(
            atoms.arrays["energies_uncertainty"], prediction.energies_std[rows], atol=1e-8
        )
    assert frames[0].info["energy"] == 99.0
    assert ase.io.read(tmp_path / "out.extxyz", index=0).info["origin"] == "test"


def test_aleatoric_deviation_is_part_of_the_uncertainty(tmp_path):
    prediction = Prediction(
        n_atoms=np.array([3]),
        method="mc",
        samples=2,
        energy=np.zeros(1),
        energy_std=np.array([3.0]),
        energy_aleatoric_std=np.array([4.0]),
    )
    ase.io.write(tmp_path / "out.extxyz", prediction.to_atoms(molecule("H2O")))
    assert ase.io.read(tmp_path / "out.extxyz").info["energy_uncertainty"] == pytest.approx(5.0)


def test_prediction_without_deviations_drops_old_ones(tmp_path):
    frame = molecule("H2O")
    frame.info["energy_uncertainty"] = 1.0
    prediction = Prediction(np.array([3]), "map", 0, energy=np.zeros(1))
    ase.io.write(tmp_path / "out.extxyz", prediction.to_atoms([frame]))
    assert "energy_uncertainty" not in ase.io.read(tmp_path / "out.extxyz").info


def test_predictions_must_belong_to_the_structures():
    prediction = Prediction(np.array([3]), "map", 0, energy=np.zeros(1))
    with pytest.raises(InputError, match="1 predictions for 2 structures"):
        prediction.to_atoms([molecule("H2O")] * 2)
    with pytest.raises(InputError, match="met a structure of 4"):
        prediction.to_atoms([molecule("NH3")])


def test_a_file_in_no_folder_is_refused(tmp_path):
    with (
        pytest.raises(InputError, match="does not exist"),
        replacing(tmp_path / "no" / "out.xyz"),
    ):
        pass


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reference_files_are_sound(reference_data):
    path = reference_data / "ammonia" / "attack_30a.extxyz"
    frames = check_structures(read_structures(path), path)
    assert len(frames) == 30


def test_an_absurd_number_of_atoms_is_refused(tmp_path):
    for digits in (20, 5000):
        path = tmp_path / f"{digits}.xyz"
        path.write_text("9" * digits + "\n\nH 0 0 0\n")
        with pytest.raises(InputError, match="expected the number of atoms"):
            list(iter_structures(path))


def test_absurdly_many_columns_are_refused(tmp_path):
    path = tmp_path / "columns.extxyz"
    path.write_text("1\nProperties=species:S:1:pos:R:3:forces:R:39219968663543723\nH 0 0 0\n")
    with pytest.raises(InputError, match="absurdly many columns"):
        list(iter_structures(path))

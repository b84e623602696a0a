"""TorchSim: many structures in one batch, each as if it were alone, until the guard objects."""

import sys

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.units import fs

import blips
from blips.backbones import PaiNN
from blips.data.ammonia import load_ammonia
from blips.errors import InputError, MissingPackageError
from blips.sim.frames import FrameSaver
from blips.sim.guard import Guard

pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic", exc_type=ImportError)
from blips.sim.torchsim import TorchSimModel, halting, integrate, relax, ts

NO_LIMIT = Guard(closest=None)


@pytest.fixture(scope="module")
def potential():
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=8)).double()


def molecules():
    found = [molecule(name) for name in ("NH3", "H2O", "CH4")]
    rng = np.random.default_rng(0)
    for atoms in found:
        atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
    return found


def state_of(structures, model):
    return ts.initialize_state(structures, model.device, model.dtype)


@pytest.mark.parametrize("method", ["map", "frozen"])
def test_a_batch_gives_what_the_ase_calculator_gives_for_each(potential, method):
    model = TorchSimModel(potential, method, member=2)
    structures = molecules()
    outputs = model(state_of(structures, model))
    first = 0
    for index, atoms in enumerate(structures):
        atoms.calc = blips.Calculator(potential, method=method, member=2)
        rows = slice(first, first + len(atoms))
        np.testing.assert_allclose(outputs["energy"][index], atoms.get_potential_energy())
        np.testing.assert_allclose(outputs["forces"][rows], atoms.get_forces(), atol=1e-10)
        first += len(atoms)


def test_kept_neighbours_follow_structures_that_leave_the_batch(potential):
    model, fresh = TorchSimModel(potential), TorchSimModel(potential, skin=0.0)
    copper = [bulk("Cu", cubic=True) * (1, 1, n) for n in (2, 1, 2)]
    for atoms in copper:
        atoms.rattle(0.1, seed=len(atoms))
    state = state_of(copper, model)
    for leaving in (None, [0], None):
        if leaving:
            state.pop(leaving)
        state.positions += 0.05 * torch.sin(state.positions)
        for name, value in model(state).items():
            assert torch.equal(value, fresh(state)[name]), name


def test_uncertainties_and_stress_have_the_calculators_values(potential):
    copper = [bulk("Cu", cubic=True), bulk("Cu", a=3.7, cubic=True) * (1, 1, 2)]
    copper[1].rattle(0.05, seed=1)
    model = TorchSimModel(potential, "mc", samples=4, seed=3, compute_stress=True)
    one = model(state_of(copper[1:], model))
    atoms = copper[1]
    atoms.calc = blips.Calculator(potential, samples=4, seed=3)
    np.testing.assert_allclose(one["energy"][0], atoms.get_potential_energy())
    voigt = atoms.get_stress(voigt=False)
    np.testing.assert_allclose(one["stress"][0], voigt, atol=1e-12)
    for name in ("energy_uncertainty", "forces_uncertainty"):
        expected = np.reshape(atoms.calc.get_property(name, atoms), one[name].shape)
        np.testing.assert_allclose(one[name], expected, atol=1e-12)
    both = model(state_of(copper, model))
    assert both["stress_uncertainty"].shape == (2, 3, 3)
    assert both["forces_uncertainty"].shape == (12, 3)


def test_what_is_left_of_a_structure_has_the_uncertainties_of_the_calculator(potential):
    copper = bulk("Cu", cubic=True)
    copper.rattle(0.05, seed=1)
    model = TorchSimModel(potential, samples=4, seed=3, compute_stress=True)
    (one,) = integrate([copper], model, NO_LIMIT, temperature=100.0, steps=0)
    copper.calc = blips.Calculator(potential, "map", samples=4, seed=3)
    found = {**one.atoms.info, **one.atoms.arrays}
    for name in ("energy_uncertainty", "forces_uncertainty", "stress_uncertainty"):
        expected = copper.calc.get_property(name, copper)
        np.testing.assert_allclose(found[name], expected, atol=1e-12)


def test_torchsim_accepts_the_model():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1, num_basis=4))
    model = TorchSimModel(potential, compute_stress=True)
    ts.models.interface.validate_model_outputs(model, model.device, model.dtype)


def test_several_ammonias_relax_to_one_minimum(ammonia_potential):
    start = load_ammonia("valid")[:4]
    model = TorchSimModel(ammonia_potential, samples=8)
    finished = relax(start, model, NO_LIMIT, force_tolerance=0.02, steps=300)
    assert [one.status for one in finished] == ["converged"] * 4
    energies = [one.atoms.get_potential_energy() for one in finished]
    assert np.ptp(energies) < 2e-3
    for one, before in zip(finished, start, strict=True):
        one.atoms.calc = blips.Calculator(ammonia_potential, method="map")
        assert np.linalg.norm(one.atoms.get_forces(), axis=1).max() < 0.02
        assert one.atoms.get_potential_energy() <= ammonia_potential.predict(before).energy[0]


def test_each_structure_moves_as_if_it_were_alone(potential):
    structures = molecules()
    for number, atoms in enumerate(structures):
        thermalize_momenta(atoms, 300, rng=np.random.default_rng(number))
    model = TorchSimModel(potential)
    options = {"temperature": 300.0, "steps": 6, "every": 3, "integrator": ts.nve}
    together = integrate(structures, model, NO_LIMIT, **options)
    assert [one.status for one in together] == ["done"] * 3
    for one, atoms in zip(together, structures, strict=True):
        (alone,) = integrate([atoms], model, NO_LIMIT, **options)
        np.testing.assert_allclose(one.atoms.positions, alone.atoms.positions, atol=1e-9)
        atoms.calc = blips.Calculator(potential, method="map")
        VelocityVerlet(atoms, 0.5 * fs).run(6)
        np.testing.assert_allclose(one.atoms.positions, atoms.positions, atol=1e-6)


def test_dynamics_conserve_energy_and_momenta_have_ases_unit(potential):
    atoms = molecules()[0]
    model = TorchSimModel(potential)
    ends = [
        integrate(
            [atoms], model, NO_LIMIT, temperature=300, steps=n, timestep=0.2, integrator=ts.nve
        )
        for n in (0, 50)
    ]
    totals = [end[0].atoms.get_total_energy() for end in ends]
    assert totals[1] == pytest.approx(totals[0], abs=2e-4)
    assert ends[0][0].atoms.get_kinetic_energy() > 0.01


def force_std(potential, structures, samples):
    prediction = potential.predict(structures, samples=samples)
    return [np.linalg.norm(prediction[k].forces_std, axis=1).max() for k in range(len(structures))]


def test_dynamics_halt_those_that_pass_the_limit_and_no_others(ammonia_potential):
    start = min(load_ammonia("train"), key=lambda atoms: atoms.get_potential_energy())
    limit = 1.5 * max(force_std(ammonia_potential, load_ammonia("valid"), 16))
    model = TorchSimModel(ammonia_potential, samples=16)
    guard = Guard(high=limit, farthest=2.5)
    cold_and_hot = [10.0, 12000.0, 10.0]
    finished = integrate([start] * 3, model, guard, temperature=cold_and_hot, steps=80, seed=4)
    assert [one.status for one in finished] == ["done", "halted", "done"]
    hot = finished[1]
    assert hot.steps < 80
    assert hot.findings[0].limit == "force_std"
    assert "exceeds" in hot.reason
    assert np.linalg.norm(hot.atoms.arrays["forces_uncertainty"], axis=1).max() > limit
    assert np.linalg.norm(finished[0].atoms.arrays["forces_uncertainty"], axis=1).max() < limit
    again = integrate([start] * 3, model, guard, temperature=cold_and_hot, steps=80, seed=4)
    np.testing.assert_array_equal(again[2].atoms.positions, finished[2].atoms.positions)


def test_frames_between_the_thresholds_are_saved_for_each_structure(ammonia_potential, tmp_path):
    start = min(load_ammonia("train"), key=lambda atoms: atoms.get_potential_energy())
    saver = FrameSaver(tmp_path / "frames.extxyz", every=20, distinct=0.0)
    model = TorchSimModel(ammonia_potential, samples=4)
    guard = Guard(low=1e-6, high=1e6)
    finished = integrate([start] * 2, model, guard, temperature=50, steps=40, saver=saver)
    assert [(one.status, one.findings) for one in finished] == [("done", [])] * 2
    frames = ase.io.read(saver.file, ":")
    assert [frame.info["step"] for frame in frames] == [0, 0, 20, 20, 40, 40]
    assert all("forces_uncertainty" in frame.arrays for frame in frames)


def test_the_guard_is_a_convergence_function_of_torchsim(potential):
    structures = molecules()
    stds = force_std(potential, structures, 16)
    limit = float(np.mean(sorted(stds)[:2]))
    model = TorchSimModel(potential)
    ended = halting(model, Guard(high=limit, closest=None))(state_of(structures, model))
    assert ended.tolist() == [std > limit for std in stds]
    state = ts.optimize(
        structures,
        model,
        optimizer=ts.optimizers.fire,
        convergence_fn=halting(model, Guard(high=1e-9, closest=None)),
        steps_between_swaps=1,
    )
    assert state.n_systems == 3


def test_an_exploded_structure_leaves_the_others_alone(potential):
    model = TorchSimModel(potential)
    structures = molecules()
    state = state_of(structures, model)
    expected = model(state)
    state.positions[0] = torch.nan
    outputs = model(state)
    assert outputs["energy"][0].isnan()
    torch.testing.assert_close(outputs["energy"][1:], expected["energy"][1:])
    torch.testing.assert_close(outputs["forces"][4:], expected["forces"][4:])
    findings = model.check(state, Guard(high=1e9))
    assert [[f.limit for f in found] for found in findings] == [["geometry"], [], []]


def test_atoms_outside_the_domain_halt_their_structure(potential):
    close = molecule("NH3")
    close.positions[3] = close.positions[1] + [0.3, 0, 0]
    model = TorchSimModel(potential)
    pair = [molecule("NH3"), close]
    ended = integrate(pair, model, Guard(high=1e9), temperature=10.0, steps=2, every=1)
    assert [one.status for one in ended] == ["done", "halted"]
    assert "atom 1 (H) is outside the domain" in ended[1].findings[-1].text


def test_errors_name_the_remedy(potential, monkeypatch):
    model = TorchSimModel(potential)
    with pytest.raises(InputError, match=r"blips\.bayesianize"):
        TorchSimModel(PaiNN(cutoff=4.0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="use one of"):
        TorchSimModel(potential, "exact")
    with pytest.raises(InputError, match="all periodic"):
        relax([molecule("NH3"), bulk("Cu")], model, NO_LIMIT)
    with pytest.raises(InputError, match="empty"):
        relax([], model, NO_LIMIT)
    with pytest.raises(InputError, match="positive"):
        integrate(molecules(), model, NO_LIMIT, temperature=-1.0, steps=1)
    with pytest.raises(InputError, match="every is 0; expected 1 or more"):
        relax(molecules(), model, NO_LIMIT, every=0)
    monkeypatch.setitem(sys.modules, "torch_sim", None)
    monkeypatch.delitem(sys.modules, "blips.sim.torchsim")
    with pytest.raises(MissingPackageError, match="pip install torch-sim-atomistic"):
        import blips.sim.torchsim  # noqa: F401

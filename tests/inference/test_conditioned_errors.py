"""What cannot be conditioned, or predicted, says why."""

import pytest
import torch
from ase import Atoms

import blips
from blips import keys
from blips.backbones import Adapter
from blips.errors import InputError, TooLargeError
from blips.inference import rows as row_sums
from helpers import quartz
from inference.conditioning import FAR, TRAIN, VALID, predict
from inference.models import (
    small,
)
from studies.nbody import EGNN

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def unlabelled() -> list[Atoms]:
    return [atoms.copy() for atoms in VALID]


@pytest.mark.parametrize(
    ("structures", "options", "message"),
    [
        (TRAIN, {"valid": []}, "list of validation structures is empty"),
        (TRAIN, {"valid": unlabelled()}, "neither energies nor forces"),
        (TRAIN, {}, r"needs valid=\.\.\."),
        ([], {"valid": VALID}, "no structures to condition on"),
        (iter([]), {"valid": VALID}, "no structures to condition on"),
        (TRAIN, {"valid": VALID, "maps": "nothing*"}, r"no map matches 'nothing\*'"),
        (TRAIN, {"valid": VALID, "dimension": 0}, "positive dimension"),
        (TRAIN, {"valid": VALID, "coefficients": "unknown"}, "coefficients"),
    ],
)
def test_what_cannot_be_conditioned_says_why(structures, options: dict, message: str):
    potential = small("painn")
    with pytest.raises(InputError, match=message):
        potential.condition(structures, **options)
    assert potential.posterior is None


@pytest.mark.parametrize(
    "changes",
    [{"maps": "all"}, {"maps": "readout.0"}, {"seed": 1}, {"dimension": 7}],
    ids=str,
)
def test_a_second_call_with_other_coordinates_is_refused(painn, changes: dict):
    with pytest.raises(InputError, match=r"conditioned already.*posterior = None"):
        painn.condition(FAR, **changes)


def test_a_second_call_with_other_coefficients_is_refused(painn):
    with pytest.raises(InputError, match="conditioned already"):
        painn.condition(FAR, coefficients="network")


def test_a_dimension_beyond_memory_names_one_that_fits(monkeypatch):
    monkeypatch.setattr(row_sums, "available_bytes", lambda: 4e4)
    with pytest.raises(TooLargeError, match="use dimension=35 or less"):
        small("painn").condition(TRAIN, valid=VALID)  # 36 weights
    potential = small("painn")
    potential.condition(TRAIN, valid=VALID, dimension=35)
    assert potential.posterior.maps.sketch.size == 35


def test_particle_models_are_no_potentials():
    torch.manual_seed(0)
    with pytest.raises(InputError, match="EGNN is no potential"):
        blips.bayesianize(EGNN(hidden=8, layers=1)).condition(TRAIN, valid=VALID)


@pytest.mark.parametrize("samples", [-1, 1])
def test_one_draw_has_no_deviation(painn, samples: int):
    with pytest.raises(InputError, match=f"samples={samples}.*at least 2 samples"):
        predict(painn, FAR, samples=samples)


def test_without_posterior_there_is_no_conditioned_prediction():
    potential = small("painn")
    for call in (lambda: predict(potential, FAR), lambda: potential.draw(1, method="conditioned")):
        with pytest.raises(InputError, match="not conditioned on data"):
            call()


def test_a_direct_model_without_stress_says_so():
    def outputs(model, graph):
        forces = model(graph.vectors()) / graph.num_edges
        forces = torch.zeros_like(graph.positions).index_add(0, graph.edge_index[0], forces)
        energy = graph.sum_over_structures(forces.square().sum(1))
        return {keys.ENERGY: energy, keys.FORCES: forces}

    torch.manual_seed(0)
    direct = blips.bayesianize(Adapter(torch.nn.Linear(3, 3).double(), outputs, 3.0))
    direct.condition(TRAIN, valid=VALID, maps="all")
    assert (predict(direct, FAR, samples=2).forces_std > 0).all()
    with pytest.raises(InputError, match="no stress"):
        predict(direct, quartz(), samples=2, stress=True)


def test_overlapping_atoms_say_so():
    overlapping = Atoms("H2", [[0, 0, 0], [0, 0, 1e-200]])
    with pytest.raises(InputError):
        small("painn").condition([overlapping], valid=VALID)

"""ORB: checkpoints, weights of the package, released names."""

import sys
import warnings

import numpy as np
import pytest
import torch

import blips
from blips.backbones import RELEASED, adapter, build, load
from blips.backbones.orb import DirectOrb, Orb
from blips.errors import CheckpointError, MissingPackageError
from helpers import SMALL_ORB, orb_package, quartz, small_orb

# The package hands torch tensors to functions of ASE that expect arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}


@pytest.fixture(params=["orb", "orb-direct"])
def orb(request: pytest.FixtureRequest) -> Orb:
    return small_orb(request.param)


def test_checkpoints_of_blips(orb: Orb, tmp_path):
    potential = blips.bayesianize(orb, **FOUNDATION, maps=["*_edge_mlp*", "*_encoder*"])
    potential.backbone.reference.set({14: -1.0, 8: 0.5})
    blips.save(potential, tmp_path / "orb.safetensors")
    again = blips.load(tmp_path / "orb.safetensors")
    assert isinstance(again, blips.BayesianPotential)
    assert type(again.backbone) is type(orb)
    assert again.report() == potential.report()
    atoms = quartz(rattle=0.1)
    one, other = (p.predict(atoms, samples=2, stress=True) for p in (potential, again))
    for name in ("energy", "energy_std", "forces", "stress_std"):
        np.testing.assert_array_equal(one.array(name), other.array(name))


@pytest.fixture
def kept_torch_settings():
    """The package's loader changes torch's default dtype and matmul precision."""
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.mark.usefixtures("kept_torch_settings")
def test_exported_weights_are_a_checkpoint_of_the_package(orb: Orb, tmp_path):
    potential = blips.bayesianize(orb, **FOUNDATION)
    orb.reference.set({14: -1.0, 8: 0.5})  # refitted energies of the elements go along
    path = orb.export(tmp_path / "orb.ckpt")
    pretrained = orb_package("pretrained")
    model = getattr(pretrained, type(orb).architecture)(
        device="cpu", system_config=orb.model.system_config, **SMALL_ORB
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Setting global torch default dtype"
        model = pretrained.load_model(
            model, str(path), "cpu", precision="float32-highest", compile=False
        )
    atoms = quartz(rattle=0.1)
    outputs = potential(orb.graph(atoms))
    atoms.calc = orb_package("calculator").ORBCalculator(model, device="cpu")
    assert atoms.get_potential_energy() == pytest.approx(outputs["energy"].item(), rel=1e-6)
    np.testing.assert_allclose(atoms.get_forces(), outputs["forces"].detach().numpy(), atol=1e-5)
    orb.reference.set({}, scale=2.0)
    with pytest.raises(CheckpointError, match="scale"):
        orb.export(path)


def test_weights_of_another_kind_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch):
    small = {name: type(name, (cls,), {}) for name, cls in (("c", Orb), ("d", DirectOrb))}
    for cls in small.values():
        init = cls.__init__
        monkeypatch.setattr(cls, "__init__", lambda s, n, init=init: init(s, n, **SMALL_ORB))
    path = small_orb("orb").export(tmp_path / "conservative.ckpt")
    assert small["c"].released(variant="conservative-20-omat", weights=path).max_num_neighbors == 20
    with pytest.raises(CheckpointError, match=r"has no heads\.forces.*another kind"):
        small["d"].released(variant="direct-20-omat", weights=path)
    wider = small_orb("orb", latent_dim=24).export(tmp_path / "wider.ckpt")
    with pytest.raises(CheckpointError, match="do not fit"):
        small["c"].released(variant="conservative-inf-omat", weights=wider)


class RunsCode:
    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


def test_checkpoints_cannot_run_code(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DirectOrb, "__init__", lambda self, neighbours: None)
    torch.save({"weights": RunsCode()}, tmp_path / "bad.ckpt")
    with pytest.raises(CheckpointError, match="cannot read"):
        load("orb-v3-direct-20-omat", weights=tmp_path / "bad.ckpt")
    assert "ran" not in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="check the path"):
        load("orb-v3-direct-20-omat", weights=tmp_path / "absent.ckpt")


def test_without_weights_the_package_downloads_its_own(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def offline(address: str):
        asked.append(address)
        raise ConnectionError("no network")

    monkeypatch.setattr(Orb, "__init__", lambda self, neighbours: None)
    monkeypatch.setattr(orb_package("pretrained"), "cached_path", offline)
    with pytest.raises(CheckpointError, match=r"cannot download.*weights=file"):
        load("orb-v3-conservative-inf-mpa")
    assert asked[0].endswith("orb-v3-conservative-inf-mpa-20250404.ckpt")


def test_every_released_name_is_one_of_the_packages():
    theirs = orb_package("pretrained").ORB_PRETRAINED_MODELS
    names = [name for name in RELEASED if name.startswith("orb-")]
    assert len(names) == 8
    for name in names:
        family, options = RELEASED[name]
        assert name == f"orb-v3-{options['variant']}"
        assert name in theirs
        assert adapter(family).conservative == ("conservative" in name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "orb_models.forcefield.pretrained", None)
    with pytest.raises(MissingPackageError, match=r"pip install orb-models==0\.5\.5"):
        build("orb")

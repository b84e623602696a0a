"""The paper's inference networks: what each of them reads."""

import pytest
import torch

import blips
from blips.backbones import PaiNN
from blips.bayes.encoder import NETWORKS, InferenceNetwork
from blips.errors import InputError
from studies import encoders

ROLES = {"blocks.0.filter": "edge", "blocks.1.filter": "edge", "blocks.0.update": "node"}
SIZES = {"edge": 5, "node_type": 10}


def features(atoms: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([[i, j] for i in range(atoms) for j in range(atoms) if i != j]).T
    vectors = torch.randn(edges.shape[1], 3, generator=generator)
    return {
        "edge": torch.randn(edges.shape[1], 5, generator=generator),
        "edge_vector": vectors,
        "edge_weight": torch.rand(edges.shape[1], generator=generator),
        "edge_index": edges,
        "node_type": torch.arange(atoms) % 3,
    }


def network(variant: str, roles: dict[str, str] = ROLES) -> InferenceNetwork:
    torch.manual_seed(0)
    return NETWORKS[variant](roles, SIZES, bounds=(1e-3, 4.0), initial=0.5)


def test_nodes_do_not_see_their_neighbours():
    near, far = features(), features()
    far["edge"] = far["edge"] + 1.0
    paper = network("paper-nbody")
    assert torch.equal(paper(near)["blocks.0.update"], paper(far)["blocks.0.update"])
    assert not torch.equal(paper(near)["blocks.0.filter"], paper(far)["blocks.0.filter"])


def test_without_maps_on_edges_no_feature_of_edges_is_read():
    net = network("paper-nbody", {"update": "node"})
    assert list(net({"node_type": torch.arange(4) % 3})) == ["update"]


def test_ammonia_variant_reads_the_squared_distance_alone():
    net = network("paper-ammonia")
    first, second = features(seed=0), features(seed=1)
    second["edge_vector"] = first["edge_vector"][:, [2, 0, 1]]
    torch.testing.assert_close(net(first)["blocks.0.filter"], net(second)["blocks.0.filter"])


def test_silica_variant_reads_directions_not_lengths():
    net, given = network("paper-silica"), features()
    lengths = torch.linspace(0.5, 3.0, 12)[:, None]
    longer = net({**given, "edge_vector": given["edge_vector"] * lengths})
    turned = net({**given, "edge_vector": given["edge_vector"].flip(1)})
    for name, coef in net(given).items():
        torch.testing.assert_close(longer[name], coef)
        assert ROLES[name] == "node" or not torch.allclose(turned[name], coef)


def test_edge_vectors_that_are_missing_are_named():
    with pytest.raises(InputError, match="needs edge vectors"):
        network("paper-silica")({k: v for k, v in features().items() if "vec" not in k})


def test_a_variant_is_chosen_by_name_and_kept_with_the_model(tmp_path):
    plain = PaiNN(cutoff=3.0, features=8, blocks=1)
    potential = blips.bayesianize(plain, encoder={"variant": "paper-ammonia", "hidden": 8})
    assert isinstance(potential.encoder, encoders.AmmoniaNetwork)
    again = blips.load(blips.save(potential, tmp_path / "model.safetensors"))
    assert isinstance(again.encoder, encoders.AmmoniaNetwork)
    with pytest.raises(InputError, match="unknown variant 'element'"):
        blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1), encoder={"variant": "element"})

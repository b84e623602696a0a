import pytest
import torch

from blips.bayes.encoder import InferenceNetwork
from blips.errors import InputError

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


def network(**options) -> InferenceNetwork:
    torch.manual_seed(0)
    options = {"bounds": (1e-3, 4.0), "initial": 0.5} | options
    return InferenceNetwork(ROLES, SIZES, **options)


def test_one_coefficient_per_map_and_row_keyed_by_name_and_near_the_start():
    coefficients = network()(features())
    assert {name: len(c) for name, c in coefficients.items()} == {
        "blocks.0.filter": 12,
        "blocks.1.filter": 12,
        "blocks.0.update": 4,
    }
    for coef in coefficients.values():
        assert ((coef - 0.5).abs() < 0.25).all()
    assert not torch.equal(coefficients["blocks.0.filter"], coefficients["blocks.1.filter"])


def test_coefficients_follow_names_not_positions():
    torch.manual_seed(0)
    reordered = InferenceNetwork(
        dict(reversed(ROLES.items())), SIZES, bounds=(1e-3, 4.0), initial=0.5
    )
    assert set(reordered(features())) == set(ROLES)
    assert reordered.columns["edge"] == {"blocks.1.filter": 0, "blocks.0.filter": 1}


def test_bounds_hold_however_extreme_the_network():
    net = network()
    with torch.no_grad():
        for head in net.heads.values():
            head[-1].weight.mul_(1e4)
    for coef in net(features()).values():
        assert (coef >= 1e-3 * (1 - 1e-5)).all()
        assert (coef <= 4.0 * (1 + 1e-5)).all()


def test_smooth_clamp_is_r_over_one_minus_r_of_a_sigmoid_with_another_origin():
    logits = torch.linspace(-8.0, 8.0, 50, dtype=torch.float64)
    low, high = 1e-3, 4.0
    r_low, r_high = low / (1 + low), high / (1 + high)
    r = r_low + (r_high - r_low) * torch.sigmoid(logits)
    origin = torch.tensor((1 - r_high) / (1 - r_low), dtype=torch.float64).log()
    coef = network(bounds=(low, high)).coefficients_of(logits + origin)
    torch.testing.assert_close(coef, r / (1 - r))


def test_gradients_are_alive_near_a_bound():
    net = network()
    with torch.no_grad():
        net.heads["node"][-1].bias.fill_(3.0)
    net(features())["blocks.0.update"].sum().backward()
    assert bool(net.heads["node"][-1].bias.grad.abs().sum() > 0)


def test_node_coefficients_see_the_neighbourhood():
    near, far = features(), features()
    far["edge"] = far["edge"] + 1.0
    assert not torch.equal(network()(near)["blocks.0.update"], network()(far)["blocks.0.update"])


def test_an_edge_at_the_cutoff_has_no_say_in_node_coefficients():
    with_edge = features()
    with_edge["edge_weight"][0] = 0.0
    without = {k: v.clone() for k, v in with_edge.items()}
    for key in ("edge", "edge_weight", "edge_vector"):
        without[key] = without[key][1:]
    without["edge_index"] = without["edge_index"][:, 1:]
    net = network()
    torch.testing.assert_close(net(with_edge)["blocks.0.update"], net(without)["blocks.0.update"])


def test_a_node_sees_the_edges_that_it_receives():
    near = features(atoms=3)
    for key in ("edge", "edge_weight", "edge_vector"):
        near[key] = near[key][:1]
    near["edge_index"] = torch.tensor([[2], [0]])  # node 2 receives what node 0 sends
    far = near | {"edge": near["edge"] + 1.0}
    changed = network()(near)["blocks.0.update"] != network()(far)["blocks.0.update"]
    assert changed.tolist() == [False, False, True]


@pytest.mark.parametrize("initial", [1e-3, 4.0])
def test_a_start_at_a_bound_is_near_it(initial):
    for coef in network(initial=initial)(features()).values():
        assert ((coef - initial).abs() < 0.05).all()


def test_sharing_per_layer_gives_one_coefficient_to_all_its_maps():
    roles = {"blocks.0.a": "edge", "blocks.0.b": "edge", "blocks.1.a": "edge"}
    net = InferenceNetwork(roles, SIZES, bounds=(1e-3, 4.0), initial=0.5, share="layer")
    coefficients = net(features())
    assert torch.equal(coefficients["blocks.0.a"], coefficients["blocks.0.b"])
    assert not torch.equal(coefficients["blocks.0.a"], coefficients["blocks.1.a"])


def test_further_row_types_get_a_head_of_their_own():
    roles = {**ROLES, "angles.0": "angle"}
    net = InferenceNetwork(roles, {**SIZES, "angle": 7}, bounds=(1e-3, 4.0), initial=0.5)
    assert net({**features(), "angle": torch.randn(9, 7)})["angles.0"].shape == (9,)


def test_bad_options_and_features_are_refused():
    with pytest.raises(InputError, match="0 < least < largest"):
        network(bounds=(0.0, 1.0))
    with pytest.raises(InputError, match="outside its bounds"):
        network(initial=5.0)
    with pytest.raises(InputError, match="at least one hidden layer, got depth=0"):
        network(depth=0)
    with pytest.raises(InputError, match="no features are declared for 'angle' rows"):
        InferenceNetwork({"a": "angle"}, SIZES, bounds=(1e-3, 4.0), initial=0.5)
    broken = features()
    broken["edge"][0, 0] = torch.nan
    with pytest.raises(InputError, match="non-finite coefficients"):
        network()(broken)


def test_a_start_at_a_bound_is_a_thousandth_of_the_range_away():
    for initial, expected in ((1e-3, 1e-3 + 1e-3 * 3.999), (4.0, 4.0 - 1e-3 * 3.999)):
        net = network(initial=initial)
        with torch.no_grad():
            for head in net.heads.values():
                head[-1].weight.zero_()
        for coef in net(features()).values():
            torch.testing.assert_close(coef, torch.full_like(coef, expected))


def test_heads_have_two_hidden_layers_and_a_column_for_every_map():
    hidden = sum(isinstance(layer, torch.nn.Linear) for layer in network().heads["node"]) - 1
    assert hidden == 2
    widths = {role: head[-1].out_features for role, head in network().heads.items()}
    assert widths == {"edge": 2, "node": 1}


def test_labels_and_features_of_nodes_count_both():
    torch.manual_seed(0)
    net = InferenceNetwork(
        {"update": "node"}, {**SIZES, "node": 3}, bounds=(1e-3, 4.0), initial=0.5
    )
    given = {**features(), "node": torch.randn(4, 3)}
    before = net(given)["update"]
    for change in ({"node": given["node"] + 1.0}, {"node_type": given["node_type"] + 1}):
        assert not torch.allclose(net({**given, **change})["update"], before)


@pytest.mark.parametrize("initial", [0.7, 2.0, 3.5])
def test_every_row_starts_from_the_initial_coefficient(initial):
    net = network(bounds=(0.5, 4.0), initial=initial)
    with torch.no_grad():
        for head in net.heads.values():
            head[-1].weight.zero_()
    for coef in net(features()).values():
        torch.testing.assert_close(coef, torch.full_like(coef, initial))


def test_widths_are_those_of_the_paper_by_default():
    net = network()
    assert net.embedding.embedding_dim == 16
    assert net.pair_layer[0].in_features == 5 + 2 * 16
    assert net.pair_layer[0].out_features == 64
    assert [layer.in_features for layer in net.heads["node"][::2]] == [16 + 64, 64, 64]
    assert [layer.in_features for layer in net.heads["edge"][::2]] == [64, 64]
    without_edges = InferenceNetwork(
        {"update": "node"}, {"node_type": 10}, bounds=(1e-3, 4.0), initial=0.5
    )
    assert without_edges.pair_layer[0].in_features == 2 * 16
    without_labels = InferenceNetwork(
        {"update": "node"}, {"node": 3, "edge": 5}, bounds=(1e-3, 4.0), initial=0.5
    )
    assert without_labels.embedding is None
    assert without_labels.pair_layer[0].in_features == 5 + 2 * 3

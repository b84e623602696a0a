import json

import blips
from blips.experiments.demo import run_demo


def test_the_demo_leaves_a_calibrated_model_metrics_figures_and_a_verdict(tmp_path, capsys):
    result = run_demo(tmp_path, epochs=2)
    assert set(result.evaluations) == {"in distribution", "out of distribution"}
    model = blips.load(tmp_path / "blip.safetensors")
    assert set(model.calibration) == {"energy", "forces"}
    for name in ("in_distribution", "out_of_distribution"):
        metrics = json.loads((tmp_path / f"metrics_{name}.json").read_text())
        assert set(metrics) == {"BLIP", "BLIP, uncalibrated", "plain"}
        assert len(list((tmp_path / "figures" / name).glob("*.png"))) == 6
    summary = (tmp_path / "summary.md").read_text()
    assert "force errors of BLIP grow" in summary
    assert "summary  " in capsys.readouterr().out

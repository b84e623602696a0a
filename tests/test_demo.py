import json

import blips
from blips.demo import BLIP, CONDITIONED, PLAIN, run_demo


def test_the_demo_leaves_a_conditioned_model_metrics_figures_and_a_report(tmp_path, capsys):
    run_demo(tmp_path, epochs=2)
    assert blips.load(tmp_path / "ammonia.safetensors").posterior is not None
    for name in ("near", "far"):
        metrics = json.loads((tmp_path / f"metrics_{name}.json").read_text())
        assert set(metrics) == {CONDITIONED, BLIP, PLAIN}
        assert metrics[CONDITIONED]["forces"]["mae"] == metrics[PLAIN]["forces"]["mae"]
        assert len(list((tmp_path / "figures" / name).glob("*.png"))) == 5
    told = capsys.readouterr().out
    for name in ("near", "far"):
        metrics = json.loads((tmp_path / f"metrics_{name}.json").read_text())
        (row,) = (line for line in told.splitlines() if f"{name}, {CONDITIONED}" in line)
        assert f"{metrics[CONDITIONED]['forces']['coverage_90']['value']:.3g}" in row
    assert f"Far, {CONDITIONED}: 129 structures" in " ".join(told.split())
    assert "CHGNet as released" in told
    assert "".join(told.split()).endswith("report.html")  # lines may be wrapped
    assert (tmp_path / "report.html").stat().st_size > 100_000

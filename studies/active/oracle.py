"""How good could picks be? Campaigns that choose by the true error of the forces.

    python -m studies.active.oracle acac nh3 --seeds 3 --output results/active/oracle.json

An oracle picks the candidates whose forces are most wrong, as no rule can know. Campaigns are those
of the study, with the oracle's scores in place of the paper's rule. Where it does not need fewer
labels than random picks, no rule that looks for errors does.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from ase import Atoms

from blips.active import worker
from blips.active.frames import digest
from blips.active.summary import labels_to_reach
from blips.train.released import load_once
from studies.active import study
from studies.active.data import SETS
from studies.spec import Layout, Run, RunSpec

Scores = Callable[..., dict[str, np.ndarray]]


def with_true_errors(scores_of: Scores, pool: Sequence[Atoms]) -> Scores:
    """Put the mean absolute force error of each candidate in place of its energy std."""
    truth = {digest(atoms): atoms.get_forces() for atoms in pool}

    def scores(structures: Sequence[Atoms], model: Path, *settings: Any) -> dict[str, np.ndarray]:
        found = load_once(model).predict(structures, method="map").array("forces")
        ends = np.cumsum([len(atoms) for atoms in structures])[:-1]
        errors = [
            np.abs(own - truth[digest(atoms)]).mean()
            for own, atoms in zip(np.split(found, ends), structures, strict=True)
        ]
        return {**scores_of(structures, model, *settings), "energy_std": np.array(errors)}

    return scores


def campaign(data: str, seed: int, profile: str, folder: Path) -> list[dict[str, Any]]:
    """Run a campaign with the oracle's picks; return its errors by labels."""
    settings = study._campaign(study.PROFILES[profile].sets[data], "energy_std")
    spec = RunSpec(study.STUDY, f"{data}-oracle", {"data": data, "campaign": settings}, seed)
    oracle = with_true_errors(worker._scores_of_batch, SETS[data]().pool)
    run = Run(spec, folder, folder / "figures", {})
    with patch.object(worker, "_scores_of_batch", oracle):
        return study.execute(run).details["curve"]


def compared(data: str, seeds: int, profile: str) -> list[dict[str, Any]]:
    """Compare the oracle with the study's random campaigns of the same seeds."""
    layout = Layout.of(study.STUDY, profile, "results", "runs")
    specs = {spec.id: spec for spec in study.specs(profile)}
    found = []
    for seed in range(seeds):
        random = layout.read(specs[f"{data}-random-seed{seed}"])
        if random is None:
            raise SystemExit("run the study's random campaigns first")
        last = random["details"]["curve"][-1]
        with tempfile.TemporaryDirectory() as folder:
            curve = campaign(data, seed, profile, Path(folder))
        share = labels_to_reach(curve, last["force_mae"]) / last["labels"]
        errors = {point["labels"]: point["force_mae"] for point in curve}
        found.append({"seed": seed, "random": last["force_mae"], "oracle": errors, "share": share})
        print(f"{data}, seed {seed}: {share:.2f} of random's labels", flush=True)
    return found


def main() -> None:
    """Run the oracle's campaigns, and write their errors beside random's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", choices=list(SETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--profile", default="default", choices=list(study.PROFILES))
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    found = {data: compared(data, given.seeds, given.profile) for data in given.data}
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

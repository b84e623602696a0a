"""What a run is, where its files are, what it gets and what it gives.

results/<study>/<profile>/<run>.json      what a finished run found
runs/<study>/<profile>/<run>-<hash>/      where it works: checkpoints, log.txt, elapsed.json
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HASH_DIGITS = 10
BLIP_TRAINING = {"noise": True, "condition": False}
"""What training in the paper's studies has beside their settings: they are about BLIP's noise."""


@dataclass(frozen=True)
class RunSpec:
    """What one run does. Two runs with the same hash find the same.

    Attributes:
        study: name of the study.
        name: of the run within its study, without the seed.
        settings: everything that its result depends on, JSON-able.
        seed: of its random numbers.
        needs: ids of the runs whose folders it builds on; it starts when they are finished.
    """

    study: str
    name: str
    settings: dict[str, Any]
    seed: int
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name of the result's file."""
        return f"{self.name}-seed{self.seed}"

    @property
    def hash(self) -> str:
        """Digest of the settings, whatever the order of their keys."""
        text = json.dumps(asdict(self), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RunSpec":
        """Restore what `dataclasses.asdict` returned, also through JSON."""
        return cls(**{**content, "needs": tuple(content["needs"])})


@dataclass(frozen=True)
class Layout:
    """Where the files of one profile of a study are."""

    results: Path
    runs: Path

    @classmethod
    def of(cls, study: str, profile: str, folder: str | Path, runs: str | Path) -> "Layout":
        """Return <folder>/<study>/<profile> and <runs>/<study>/<profile>."""
        return cls(Path(folder) / study / profile, Path(runs) / study / profile)

    @property
    def figures(self) -> Path:
        """Figures of all runs."""
        return self.results / "figures"

    def result_file(self, spec: RunSpec) -> Path:
        """Return the file of the run's result."""
        return self.results / f"{spec.id}.json"

    def run_folder(self, spec: RunSpec) -> Path:
        """Return the folder in which the run works and resumes."""
        return self.runs / f"{spec.id}-{spec.hash}"

    def log(self, spec: RunSpec) -> Path:
        """Return the file of everything that the run prints."""
        return self.run_folder(spec) / "log.txt"

    def read(self, spec: RunSpec) -> dict[str, Any] | None:
        """Read the result of a finished run with these very settings, else None."""
        try:
            result = json.loads(self.result_file(spec).read_text(encoding="utf-8"))
            return result if result["hash"] == spec.hash else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Run:
    """What `execute` gets.

    Attributes:
        spec: what to do.
        folder: where to work; what an interrupted run left is there, to be resumed.
        figures: where figures go, `<id>-<what>.png`.
        needs: folders of the runs that this one builds on, by id.
    """

    spec: RunSpec
    folder: Path
    figures: Path
    needs: Mapping[str, Path]


@dataclass(frozen=True)
class Findings:
    """What `execute` returns, JSON-able.

    Attributes:
        metrics: name -> {"value", "low", "high"}, the bounds None where there is no interval.
        details: anything else worth keeping, such as the best epoch.
    """

    metrics: dict[str, dict[str, float | None]]
    details: dict[str, Any]

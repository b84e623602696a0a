"""Configuration of a campaign: strict, every field with a default but the structures."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, model_validator

from blips.config import (
    AtomEnergies,
    ModelConfig,
    Section,
    Source,
    TrainingConfig,
    is_override,
    load_as,
    merge_sources,
    setting,
)
from blips.sim.reference import check_trust, needs_trust

Rule = Literal["information", "expected_reduction", "force_std", "energy_std", "random", "auto"]
CLOSED_FORM = ("information", "expected_reduction", "auto")  # need the conditioned posterior


class InitialConfig(Section):
    """The first structures to label: frames of a file, or displaced copies of them."""

    structures: str | None = setting(None, "any file that ASE reads")
    count: int = setting(20, "structures to begin with", ge=2)
    displacement: float = setting(
        0.1, "A, normal, of every coordinate; 0 takes frames as they are", ge=0
    )


class ExploreConfig(Section):
    """Where candidates come from."""

    kind: Literal["md", "pool"] = "md"
    pool: str | None = setting(None, "pool: file of structures, streamed")
    structures: str | None = setting(None, "md: starting points; default: what is labelled")
    potential: Literal["mean", "member"] = setting(
        "mean", "md: the plain model, or a member for each trajectory"
    )
    temperatures: list[float] = setting([300.0, 600.0], "K", min_length=1)
    pressure: float | list[float] | None = setting(
        None, "GPa, one or several, for periodic structures; else NVT"
    )
    walkers: int = setting(4, "trajectories in a round", ge=1)
    steps: int = setting(500, "of a trajectory", ge=1)
    timestep: float = setting(0.5, "fs", gt=0)
    friction: float = setting(0.02, "1/fs", gt=0)
    every: int = setting(10, "steps between frames, and guards' looks", ge=1)

    def conditions(self, walker: int) -> tuple[float, float | None]:
        """Return temperature (K) and pressure (GPa) of a trajectory, cycling through all pairs."""
        several = self.pressure if isinstance(self.pressure, list) else [self.pressure]
        pressures = several or [None]
        round, place = divmod(walker, len(self.temperatures))
        return self.temperatures[place], pressures[round % len(pressures)]


class LimitsConfig(Section):
    """What the model may be asked about: beyond it trajectories end and candidates are left out."""

    force_std: PositiveFloat | Literal["auto"] | None = setting(
        "auto", "of an atom, eV/A; auto: the largest force of a label"
    )
    energy_std_per_atom: float | None = setting(None, "eV", gt=0)
    force: float | None = setting(100.0, "largest predicted force, eV/A", gt=0)
    closest: float | None = setting(0.5, "in sums of covalent radii", gt=0)
    farthest: float | None = setting(None, "A", gt=0, lt=6)


class SelectConfig(Section):
    """Which candidates are labelled."""

    rule: Rule = "expected_reduction"
    batch: int = setting(5, "labels in a round; small ones need fewer in all", ge=1)
    samples: int = setting(16, "posterior samples for a candidate", ge=2)
    method: Literal["auto", "conditioned", "mc", "frozen"] = "auto"
    rows: int = setting(4, "random sums of a candidate's forces", ge=1)
    target: str | None = setting(
        None, "expected_reduction: structures that matter; else the candidates"
    )
    cost: float = setting(0.0, "power of the number of atoms that a label costs", ge=0)
    keep: int = setting(50, "best candidates kept, in batches", ge=1)
    chunk: int = setting(64, "candidates screened in one job", ge=1)


class LabelConfig(Section):
    """Who answers: an ASE calculator, in a process of its own."""

    calculator: str = setting(
        "gfn2-xtb", "gfn2-xtb, gfn1-xtb, pyscf, espresso, emt, or package.module:Name"
    )
    options: dict[str, Any] = setting({}, "of its constructor")
    trust: bool = setting(False, "let classes, commands and paths that this file names run")
    stress: bool = setting(False, "also ask for the stress")
    timeout: float = setting(3600.0, "s, then the process is killed", gt=0)
    retries: int = setting(1, "of a label that failed", ge=0)
    max_force: float | None = setting(None, "eV/A; a label with a larger one is set aside", gt=0)


class ExecutorConfig(Section):
    """Where jobs run: in this process, on a local Dask cluster, or on a batch system's."""

    kind: Literal["inline", "local", "slurm", "pbs"] = "local"
    workers: int = setting(2, "processes; batch system: jobs", ge=1)
    threads: int = setting(1, "of a worker, for its labels", ge=1)
    processes: bool = setting(True, "local: False for threads of this process")
    memory: str = setting("4GB", "batch system: of a job")
    walltime: str = setting("01:00:00", "batch system: of a job")
    queue: str | None = setting(None, "batch system: its name")
    account: str | None = setting(None, "batch system: who pays")
    trust: bool = setting(False, "let lines that this file names run")
    prologue: list[str] = setting([], "batch system: lines before the worker")
    extra: list[str] = setting([], "batch system: further directives")
    shared_folder: str = setting("~", "batch system: where workers find the keys of this run")
    interface: str | None = setting(None, "network interface, such as ib0")


class EvaluateConfig(Section):
    """How a round's model is judged."""

    structures: str | None = setting(
        None, "labelled file; else only the labels of each round judge"
    )


class StopConfig(Section):
    """When the campaign ends; whatever comes first."""

    rounds: int = setting(20, "rounds of selection", ge=0)
    labels: int | None = setting(None, "budget, the initial ones included", ge=1)
    force_mae: float | None = setting(
        None, "eV/A, of the evaluation; without one a bound on candidates", gt=0
    )
    confidence: float = setting(0.9, "of that bound", gt=0, lt=1)
    force_std: float | None = setting(None, "eV/A: no candidate is less certain", gt=0)


class CampaignConfig(Section):
    """Everything that `blips active` needs."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    valid: float = setting(0.15, "fraction of labels held out", gt=0, lt=1)
    retrain: Literal["scratch", "continue"] = setting(
        "scratch", "continue: from the weights of the round before"
    )
    reference_energies: AtomEnergies = setting("fit", "as data.reference_energies of training")
    initial: InitialConfig = InitialConfig()
    explore: ExploreConfig = ExploreConfig()
    limits: LimitsConfig = LimitsConfig()
    select: SelectConfig = SelectConfig()
    label: LabelConfig = LabelConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    stop: StopConfig = StopConfig()
    executor: ExecutorConfig = ExecutorConfig()
    seed: int = setting(0, "the same seed, the same campaign", ge=0)
    folder: str = setting("runs/campaign", "where everything goes")

    @model_validator(mode="after")
    def _fits_together(self) -> "CampaignConfig":
        if self.initial.structures is None:
            raise ValueError("initial.structures is missing; name a file with structures")
        if self.explore.kind == "pool" and self.explore.pool is None:
            raise ValueError("explore.kind is pool, but explore.pool names no file")
        if not self.model.bayes.enabled:
            raise ValueError("a campaign needs error bars; set model.bayes.enabled to true")
        if self.select.rule in CLOSED_FORM and not self.training.condition:
            raise ValueError(
                f"select.rule {self.select.rule} needs the conditioned posterior; set "
                "training.condition to true, or the rule to force_std"
            )
        check_trust(self.label.calculator, self.label.options, self.label.trust)
        if (commands := shell_lines(self.executor)) and not self.executor.trust:
            raise ValueError(
                f"executor.{', executor.'.join(commands)} of a file become lines of a job script, "
                "which runs them; set executor.trust to true if you trust the file, or type them "
                "on the command line"
            )
        if self.training.weights.stress > 0 and not self.label.stress:
            raise ValueError("training.weights.stress needs stresses; set label.stress to true")
        return self


def shell_lines(executor: ExecutorConfig) -> list[str]:
    """List the settings of a batch system's executor that add lines of their own to its script."""
    if executor.kind not in ("slurm", "pbs"):
        return []
    lists = [name for name in ("prologue", "extra") if getattr(executor, name)]
    words = ("memory", "walltime", "queue", "account", "shared_folder")
    return lists + [name for name in words if "\n" in str(getattr(executor, name))]


def load_campaign(*sources: Source) -> CampaignConfig:
    """Merge files, mappings and `a.b=value` overrides, left to right, and validate.

    The values of overrides, which somebody typed, need no trust.
    """
    merged, by_hand = merge_sources(*sources), merge_sources(*filter(is_override, sources))
    as_if = load_as(CampaignConfig, merged, {"label": {"trust": True}, "executor": {"trust": True}})
    wanted = {
        "label": needs_trust(as_if.label.calculator, as_if.label.options),
        "executor": shell_lines(as_if.executor),
    }
    trust: dict[str, Any] = {}
    for section, settings in wanted.items():
        names = [f"{section}.{name}" for name in settings]
        if names and all(_at(merged, name) == _at(by_hand, name) for name in names):
            trust[section] = {"trust": True}
    return load_as(CampaignConfig, merged, trust)


def _at(merged: Any, name: str) -> Any:
    """Return the value of a dotted name; None where there is none."""
    for key in name.split("."):
        merged = merged.get(key) if isinstance(merged, Mapping) else None
    return merged

"""Calculators that labellers of tests import by name."""

import os
import time
from pathlib import Path

from ase.calculators.emt import EMT


class Counting(EMT):
    """EMT that notes every finished calculation in a side file."""

    def __init__(self, file: str, seconds: float = 0.0):
        super().__init__()
        self.file, self.seconds = file, seconds

    def calculate(self, atoms=None, properties=None, system_changes=()):
        super().calculate(atoms, properties, system_changes)
        time.sleep(self.seconds)
        with Path(self.file).open("a") as file:
            file.write(f"{atoms.positions.tobytes().hex()} {os.getpid()}\n")


class Troubled(EMT):
    """EMT that hangs, dies, raises or gives NaN, by the N atom's position."""

    def __init__(self, trouble: str, below: float):
        super().__init__()
        self.trouble, self.below = trouble, below

    def calculate(self, atoms=None, properties=None, system_changes=()):
        super().calculate(atoms, properties, system_changes)
        if atoms.positions[0, 0] >= self.below:
            return
        if self.trouble == "hang":
            time.sleep(1000)
        if self.trouble == "die":
            os._exit(3)
        if self.trouble == "raise":
            raise RuntimeError("the wave function was not amused")
        self.results["forces"] = self.results["forces"] * float("nan")

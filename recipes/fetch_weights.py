"""Checkpoints that packages do not carry, out of a public wheel into blips' cache.

    python recipes/fetch_weights.py mattersim-1m mace-omat-0-small

The wheel `macer` holds both as they were released. Every file is checked against its SHA-256
before it is kept. MatterSim is under the MIT licence; MACE-OMAT-0 is under the Academic Software
License, so it serves blips' tests and is not redistributed with it.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from blips.defaults import cache_folder
from blips.errors import CheckpointError, InputError

WHEEL = "macer==0.1.15"


@dataclass(frozen=True)
class Checkpoint:
    """One file of the wheel."""

    path: str
    sha256: str
    licence: str

    @property
    def cached(self) -> Path:
        """Where the file is, or would be, in the cache."""
        return cache_folder() / "checkpoints" / Path(self.path).name


CHECKPOINTS = {
    "mattersim-1m": Checkpoint(
        "macer/mlff-model/mattersim-v1.0.0-1M.pth",
        "28b0b0b0f13efefee06b47ea4c9105a26bd3e2c8396da193430da96b3b49a8be",
        "MIT licence",
    ),
    "mace-omat-0-small": Checkpoint(
        "macer/mlff-model/mace-omat-0-small.model",
        "0abfde07862cf1e93b8b4d03cb702f29ce9c344ff2fc4de2ec0d7166d6c113a5",
        "Academic Software License (ASL): for the tests of blips, not redistributed",
    ),
}


def fetch(*names: str) -> list[Path]:
    """Return paths of these checkpoints in the cache; download those that are missing.

    Args:
        names: of `CHECKPOINTS`.
    """
    for name in names:
        if name not in CHECKPOINTS:
            raise InputError(f"unknown checkpoint {name!r}; known: {', '.join(CHECKPOINTS)}")
    missing = [CHECKPOINTS[name] for name in names if find(name) is None]
    if missing:
        with TemporaryDirectory() as folder:
            wheel = _download(folder)
            for checkpoint in missing:
                _unpack(wheel, checkpoint)
    return [CHECKPOINTS[name].cached for name in names]


def find(name: str) -> Path | None:
    """Return the cached file of this checkpoint if there is one; error if it is another file."""
    checkpoint = CHECKPOINTS[name]
    path = checkpoint.cached
    if not path.is_file():
        return None
    if _sha256(path) != checkpoint.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not {name}'s; delete the file")
    return path


def _download(folder: str) -> Path:
    """Download the wheel by pip: from whichever index the user has configured."""
    line = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder, WHEEL]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"cannot download {WHEEL}: {done.stderr.strip()[-500:]}\nCheck the connection, or "
            f"download it elsewhere and unpack its macer/mlff-model/ into {cache_folder()}"
            "/checkpoints"
        )
    return wheels[0]


def _unpack(wheel: Path, checkpoint: Checkpoint) -> None:
    """Write one file of the wheel to the cache, whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(checkpoint.path)
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        raise CheckpointError(
            f"{checkpoint.path} of {WHEEL} is not the released file: its SHA-256 differs. "
            "Do not use it; check which index pip downloads from"
        )
    target = checkpoint.cached
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Fetch the named checkpoints and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=list(CHECKPOINTS), metavar="NAME")
    names = parser.parse_args(arguments).names
    for name, path in zip(names, fetch(*names), strict=True):
        print(f"{name}: {path} ({CHECKPOINTS[name].licence})")


if __name__ == "__main__":
    main()

"""Rewrite files of the format blips-1, whose checksum left the header out.

python -m recipes.rewrite_checkpoints runs/*/best.safetensors
"""

import argparse
import json
from pathlib import Path

from safetensors.torch import load

from blips.train.checkpoint import HEADER_LENGTH_BYTES, write_tensors

BEFORE = "blips-1"


def rewrite(path: Path) -> bool:
    """Write the tensors and the header of an old file again; return whether it was one."""
    data = path.read_bytes()
    end = HEADER_LENGTH_BYTES + int.from_bytes(data[:HEADER_LENGTH_BYTES], "little")
    metadata = json.loads(data[HEADER_LENGTH_BYTES:end])["__metadata__"]
    header = json.loads(metadata["blips"])
    if header.pop("format") != BEFORE:
        return False
    del header["checksum"]
    write_tensors(path, load(data), header)
    return True


def main() -> None:
    """Rewrite the named files."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        print(f"{path}: {'rewritten' if rewrite(path) else 'is of another format, left'}")


if __name__ == "__main__":
    main()

"""Time to make the full n-body stream: 14000 simulations of 5000 steps.

Run ``python benchmarks/nbody.py --output results/benchmarks`` to write nbody.json. Wall time
depends on what else the machine does; processor time does so less.
"""

import argparse
import json
import time
from pathlib import Path

from blips.data.nbody import generate
from blips.train.run import environment


def main() -> None:
    """Generate once, print the times, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    wall, processor = time.perf_counter(), time.process_time()
    generate()
    seconds = {
        "wall_seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
    }
    print(json.dumps(seconds))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        content = {"results": seconds, "environment": environment()}
        (options.output / "nbody.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

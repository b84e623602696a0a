"""The targets of fuzzing.py by a coverage-guided fuzzer, atheris (libFuzzer for Python).

    python tests/guided_fuzzing.py --target extxyz --inputs 10000 --output results/fuzz/x.json

Our readers and those of ASE and YAML are instrumented, and inputs that reach new code are mutated
further. An input that gets anything but a result or one of blips' errors ends the process with an
error and is saved as a file crash-*.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import atheris

INSTRUMENTED = ["blips", "ase", "yaml"]
with atheris.instrument_imports(include=INSTRUMENTED):
    import fuzzing


def fuzz(target: str, inputs: int, output: Path | None) -> None:
    """Feed a reader; does not return."""
    corpus = fuzzing.FOLDER / f"corpus-{target}"
    corpus.mkdir()
    seeds = fuzzing.seeds()[target]
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    words = fuzzing.FOLDER / "words.txt"
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in fuzzing.INTERESTING)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    counts: Counter[str] = Counter()
    begun = time.perf_counter()

    def feed(data: bytes) -> None:
        counts[fuzzing.outcome(target, data)] += 1
        if counts.total() == inputs:
            seconds = round(time.perf_counter() - begun, 1)
            found = {**counts, "inputs": inputs, "seconds": seconds, "engine": "atheris"}
            print(target, json.dumps(found), flush=True)
            if output is not None:
                output.write_text(json.dumps({target: found}, indent=1) + "\n")

    options = [
        f"-runs={inputs + 100}",
        "-seed=1",
        f"-max_len={2 * max(map(len, seeds))}",
        "-timeout=60",
        "-verbosity=0",
        f"-dict={words}",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], feed)
    atheris.Fuzz()


def main() -> None:
    """Fuzz one target."""
    parser = argparse.ArgumentParser(description="Fuzz one of blips' readers with atheris.")
    parser.add_argument("--target", choices=list(fuzzing.TARGETS), required=True)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    fuzzing.limit_memory()
    fuzzing.torch.set_num_threads(1)
    fuzz(options.target, options.inputs, options.output)


if __name__ == "__main__":
    main()

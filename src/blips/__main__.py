"""The command `blips`, also as `python -m blips`: its imports may be interrupted, too."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Import and run the command; Ctrl-C at any moment is one line and exit code 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from blips.cli import main as run

        run()
    except KeyboardInterrupt:
        print("blips: interrupted", file=sys.stderr)
        sys.exit(130)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """End at once during imports, which may turn an exception into anything, and crash on it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("blips: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

"""The command `blips`, also as `python -m blips`: its imports may be interrupted, too."""

import signal
import sys
from typing import Never


def main() -> None:
    """Import and run the command; Ctrl-C at any moment is one line and exit code 130.

    An import that is interrupted may raise anything, so whatever follows Ctrl-C is its effect.
    """
    pressed = False

    def interrupt(*_: object) -> Never:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from blips.cli import main as run

        run()
    except (Exception, KeyboardInterrupt) as error:
        if not pressed and not isinstance(error, KeyboardInterrupt):
            raise
        print("blips: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

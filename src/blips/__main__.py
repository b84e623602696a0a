"""The command `blips`, also as `python -m blips`: its imports may be interrupted, too."""

import sys


def main() -> None:
    """Import and run the command; Ctrl-C at any moment is one line and exit code 130."""
    try:
        from blips.cli import main as run

        run()
    except KeyboardInterrupt:
        print("blips: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python -m blips` is the command `blips`."""

from blips.cli import main

if __name__ == "__main__":
    main()

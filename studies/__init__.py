"""Studies that can be run again: `python -m studies NAME`. Settings, runs, tables, figures."""

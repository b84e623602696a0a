"""Studies that can be run again: settings, run, table, figures, one file each."""

"""What everything stands on: errors, files, units, clocks, options of commands; no arrays."""

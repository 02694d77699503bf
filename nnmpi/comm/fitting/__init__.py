"""Making a fit of the machine at hand: probes, timing, and the fit in words."""

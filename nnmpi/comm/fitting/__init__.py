"""Making a fit of the machine at hand (measure), and telling it in words (report)."""

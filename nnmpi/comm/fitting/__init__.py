"""The fitted cost model of the machine at hand: its numbers (fit), measured (measure), told in words (report)."""

"""Collectives and pipeline schedules as text and pictures."""

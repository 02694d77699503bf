"""Collectives and pipeline schedules as text and pictures.

collectives    rounds down, ranks across, messages in the cells
schedules      a schedule's grid: stages down, time across
notebook       what a notebook shows of these values
"""

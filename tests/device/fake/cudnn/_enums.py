"""The enumerations, with the real one's members."""

import enum

from cudnn._names import snapshot

data_type = enum.Enum("data_type", snapshot()["enums"]["data_type"])
heur_mode = enum.Enum("heur_mode", snapshot()["enums"]["heur_mode"])
numerical_note = enum.Enum("numerical_note", snapshot()["enums"]["numerical_note"])

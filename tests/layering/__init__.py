"""The rules about who may import what, and how large a file may be, checked on the syntax tree."""

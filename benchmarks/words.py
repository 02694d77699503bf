"""The words of a command line."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """Return what stands between commas, without the spaces around it and without what is empty."""
    return [word.strip() for word in text.split(",") if word.strip()]

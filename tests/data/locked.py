"""A folder that may not be entered: root may enter any, so the system's refusal is played."""

from pathlib import Path

QUESTIONS = ("exists", "is_dir", "is_file", "stat", "open", "mkdir")


def lock(folder, monkeypatch):
    """Let every question about what is in the folder fail, as it does for a folder of mode 000.

    Not all versions of Python let `exists` and its like raise that; on others they return False.
    """
    for name in QUESTIONS:
        monkeypatch.setattr(Path, name, _refusing(getattr(Path, name), folder))


def _refusing(real, folder):
    def ask(path, *values, **options):
        if folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *values, **options)

    return ask

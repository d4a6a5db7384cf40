"""Check checkpoint files and Hub folders without importing torch or transformers."""

import zipfile
from pathlib import Path

from src.errors import UserError


def check_checkpoint_exists(path: Path) -> None:
    """Raise UserError unless `path` is a file."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a checkpoint, such as runs/NAME/latest-rank0.pt")


def is_valid_checkpoint(path: Path) -> bool:
    """Return whether a file that torch.save wrote is complete and its checksums match."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def check_hub_folder(folder: Path) -> None:
    """Raise UserError unless a folder has the two files that make up a model."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; give a folder that `hub.py export` wrote")

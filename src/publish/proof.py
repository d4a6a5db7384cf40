"""The files of a Hub folder, and the proof that they were compared with a checkpoint. Imports no torch."""

import json
from pathlib import Path

from src.errors import UserError
from src.files import file_digest, write_json

CARD = "README.md"
PROOF = "proof.json"  # the digests of the files that export compared with the checkpoint; push reads it
PUBLISHED = {".json", ".jinja", ".jpg", ".md", ".model", ".png", ".py", ".safetensors", ".svg", ".txt"}  # no pickles


def check_out(out: Path) -> None:
    """Raise UserError for a folder that exists, or whose name transformers cannot load."""
    if "." in out.name:
        raise UserError(f"--out {out} has a dot in its name, from which transformers cannot load code; remove it")
    if out.exists():
        raise UserError(f"--out {out} already exists; choose another folder")


def publishable_files(folder: Path) -> list[str]:
    """Return the files of a folder. Raises UserError for any not to be published: links, hidden or unknown types."""
    if not folder.is_dir():
        raise UserError(f"--folder {folder} is not a directory; give a folder that `hub.py export` wrote")
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{folder}/{name} is a link, which may point outside the folder; replace it with the file")
        if path.name.startswith("."):
            raise UserError(f"{folder}/{name} is hidden; remove or rename it")
        if path.is_file():
            if path.suffix.lower() not in PUBLISHED and name not in ("LICENSE", "NOTICE"):
                kinds = ", ".join(sorted(PUBLISHED))
                raise UserError(f"{folder}/{name} might execute code when loaded; remove it (published: {kinds})")
            names.append(name)
    return names


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the model card, which people edit, and the proof itself."""
    return {name: file_digest(folder / name) for name in publishable_files(folder) if name not in (CARD, PROOF)}


def write_proof(folder: Path, difference: float) -> None:
    """Record the largest difference between logits, the library versions and the digests of the files."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(folder / PROOF, {"largest_difference": difference, **versions, "sha256": digests(folder)})


def check_proof(folder: Path) -> None:
    """Raise UserError unless the files of a folder are those that were compared with the checkpoint."""
    advice = "give the --checkpoint to compare it with"
    try:
        proved = json.loads((folder / PROOF).read_text())["sha256"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} has no valid {PROOF} of a comparison by export; {advice}") from None
    if changed := sorted({name for name, _ in proved ^ digests(folder).items()}):
        raise UserError(f"{folder}: {', '.join(changed)} changed since export; {advice}")

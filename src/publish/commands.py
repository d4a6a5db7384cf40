"""Export, verify, push and import Hub folders. Paths are checked before torch and transformers are imported."""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from src.checkpoints.safe_load import check_checkpoint_exists
from src.cli import log
from src.errors import UserError, reason
from src.files import file_digest, write_json
from src.publish.card import model_card, read_scores
from src.publish.hub_client import CARD, download, upload

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint

PROOF = "proof.json"  # the digests of the files that were compared with the checkpoint; push reads it
PUBLISHED = {".json", ".jinja", ".jpg", ".md", ".model", ".png", ".py", ".safetensors", ".svg", ".txt"}  # no pickles


def export(checkpoint: Path, out: Path, glue: Path | None = None) -> None:
    """Write a Hub folder and verify it; `out` appears only if it gives the checkpoint's logits. Raises UserError."""
    check_out(out)
    check_checkpoint_exists(checkpoint)
    scores = None if glue is None else read_scores(glue)
    read = open_checkpoint(str(checkpoint))
    if read.published:
        raise UserError(f"{checkpoint} is a checkpoint of the paper's authors; use `hub.py import`")
    write_proved(read, out, scores)


def import_published(checkpoint: str, out: Path, tokenizer: str | None = None) -> None:
    """Convert a checkpoint of the paper's authors to a Hub folder of ours. Raises UserError for unknown tensors."""
    check_out(out)
    read = open_checkpoint(checkpoint, tokenizer)
    if not read.published:
        raise UserError(f"{checkpoint} is a checkpoint of this project; use `hub.py export`")
    write_proved(read, out)
    if not read.tokenizer:
        log.info(f"{out} has no tokenizer, since the checkpoint has none; import again with --tokenizer to add one")


def verify(checkpoint: str, folder: Path, tokenizer: str | None = None, python: str = sys.executable) -> None:
    """Compare a folder with its checkpoint and print the largest difference. Raises UserError if they differ."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give a folder that `hub.py export` wrote")
    read = open_checkpoint(checkpoint, tokenizer)
    from src.publish import folder as hub_folder

    difference = hub_folder.verify(read, folder, python)
    print(f"{folder} gives the checkpoint's logits (largest difference {difference:.1e})")


def push(
    folder: Path,
    repo_id: str,
    checkpoint: str | None = None,
    private: bool = False,
    revision: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Upload a folder whose files were compared with the checkpoint; resumes if interrupted. Raises UserError."""
    if checkpoint is None:
        check_proof(folder)
    else:
        prove(open_checkpoint(checkpoint, tokenizer), folder)
    upload(folder, repo_id, private, revision)


def open_checkpoint(name: str, tokenizer: str | None = None) -> "Checkpoint":
    """Read a checkpoint from a file or the Hub. `tokenizer`, a folder or Hub name, replaces its own."""
    path = Path(name)
    on_hub = not path.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)+", name)
    with tempfile.TemporaryDirectory() as work:
        if on_hub:
            path = download(name, Path(work))
        check_checkpoint_exists(path)
        from src.checkpoints.reading import read_checkpoint

        read = read_checkpoint(path)
        if on_hub:
            read.path, read.published = Path(name), name if read.published else None
        if tokenizer is not None:
            read.tokenizer = read_tokenizer(tokenizer, read, Path(work, "tokenizer"))
    return read


def read_tokenizer(name: str, checkpoint: "Checkpoint", work: Path) -> dict[str, dict[str, Any]]:
    """Return a tokenizer's files in a checkpoint's format. Raises UserError if it cannot be loaded or does not fit."""
    from src.data.tokenizers import load_tokenizer

    size = checkpoint.config.vocab_size
    tokenizer = load_tokenizer(name, model_max_length=checkpoint.config.max_position_embeddings)
    if len(tokenizer) > size:
        many = f"{len(tokenizer)} tokens, but the model's vocabulary is {size}"
        raise UserError(f"--tokenizer {name} has {many}; give the tokenizer that it was trained with")
    tokenizer.save_pretrained(work)
    contents = {path: json.loads(path.read_text("utf-8")) for path in work.glob("*.json")}
    contents |= {path: path.read_bytes() for path in work.iterdir() if path not in contents}
    return {path.name: {"file_extension": path.suffix, "content": content} for path, content in contents.items()}


def check_out(out: Path) -> None:
    """Raise UserError for a folder that exists, or whose name transformers cannot load."""
    if "." in out.name:
        raise UserError(f"--out {out} has a dot in its name, from which transformers cannot load code; remove it")
    if out.exists():
        raise UserError(f"--out {out} already exists; choose another folder")


def write_proved(checkpoint: "Checkpoint", out: Path, scores: dict[str, Any] | None = None) -> None:
    """Write a complete folder with its card and its proof, or nothing at all."""
    from src.publish import folder as hub_folder

    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        hub_folder.write(checkpoint, unfinished)
        (unfinished / CARD).write_text(model_card(checkpoint, out.name, scores), encoding="utf-8")
        difference = prove(checkpoint, unfinished)
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out} cannot be written ({reason(error)}); choose another or free space") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out} gives the checkpoint's logits in plain transformers (largest difference {difference:.1e})")


def prove(checkpoint: "Checkpoint", folder: Path) -> float:
    """Verify a folder and record it in PROOF. Returns the largest difference between logits."""
    import torch
    import transformers

    from src.publish import folder as hub_folder

    difference = hub_folder.verify(checkpoint, folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(folder / PROOF, {"largest_difference": difference, **versions, "sha256": digests(folder)})
    return difference


def check_proof(folder: Path) -> None:
    """Raise UserError unless the files of a folder are those that were compared with the checkpoint."""
    own, advice = digests(folder), "give the --checkpoint to compare it with"
    try:
        proved = json.loads((folder / PROOF).read_text())["sha256"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} has no valid {PROOF} of a comparison by export; {advice}") from None
    if changed := sorted({name for name, _ in proved ^ own.items()}):
        raise UserError(f"{folder}: {', '.join(changed)} changed since export; {advice}")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the model card, which people edit, and the proof itself.

    Raises UserError for any file not to be published: links, hidden files and types that could hold code.
    """
    if not folder.is_dir():
        raise UserError(f"--folder {folder} is not a directory; give a folder that `hub.py export` wrote")
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise UserError(f"{path} is a link, which may point outside the folder; replace it with the file")
        if path.name.startswith("."):
            raise UserError(f"{path} is hidden; remove or rename it")
        if path.is_file() and path.suffix.lower() not in PUBLISHED and path.name not in ("LICENSE", "NOTICE"):
            kinds = ", ".join(sorted(PUBLISHED))
            raise UserError(f"{path} might execute code when loaded; remove it (published: {kinds})")
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = file_digest(path)
    return {name: digest for name, digest in found.items() if name not in (CARD, PROOF)}

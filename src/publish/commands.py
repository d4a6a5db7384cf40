"""Export, verify, push and import Hub folders. Paths are checked before torch and transformers are imported."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.checkpoints.integrity import check_checkpoint_exists, check_hub_folder
from src.cli import log
from src.errors import UserError
from src.publish import hub_client
from src.publish.proof import CARD, check_out, check_proof, publishable_files
from src.publish.run_facts import read_scores

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint


def export(checkpoint: Path, out: Path, glue: Path | None = None) -> None:
    """Write a Hub folder and verify it; `out` appears only if it gives the checkpoint's logits. Raises UserError."""
    check_out(out)
    check_checkpoint_exists(checkpoint)
    scores = None if glue is None else read_scores(glue)
    from src.checkpoints.reading import read_checkpoint

    read = read_checkpoint(checkpoint)
    if read.published:
        raise UserError(f"{checkpoint} is a checkpoint of the paper's authors; use `hub.py import`")
    write_proved(read, out, scores)


def verify(checkpoint: str, folder: Path, tokenizer: str | None = None, python: str = sys.executable) -> None:
    """Compare a folder with its checkpoint and print the largest difference. Raises UserError if they differ."""
    check_hub_folder(folder)
    read = open_checkpoint(checkpoint, tokenizer)
    from src.publish import folder as hub_folder

    difference = hub_folder.verify(read, folder, python)
    print(f"{folder} gives the checkpoint's logits (largest difference {difference:.1e})")


def import_published(checkpoint: str, out: Path, tokenizer: str | None = None) -> None:
    """Convert a checkpoint of the paper's authors to a Hub folder of ours. Raises UserError for unknown tensors."""
    check_out(out)
    read = open_checkpoint(checkpoint, tokenizer)
    if not read.published:
        raise UserError(f"{checkpoint} is a checkpoint of this project; use `hub.py export`")
    write_proved(read, out)
    if not read.tokenizer:
        log.info(f"{out} has no tokenizer, since the checkpoint has none; import again with --tokenizer to add one")


def push(
    folder: Path,
    repo_id: str,
    checkpoint: str | None = None,
    private: bool = False,
    revision: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Upload a folder whose files were compared with the checkpoint; resumes if interrupted. Raises UserError."""
    names = publishable_files(folder)
    if checkpoint is None:
        check_proof(folder)
    else:
        read = open_checkpoint(checkpoint, tokenizer)
        from src.publish import folder as hub_folder

        hub_folder.prove(read, folder)
        names = publishable_files(folder)  # now with the new proof
    hub_client.upload(folder, names, repo_id, private, revision)


def open_checkpoint(name: str, tokenizer: str | None = None) -> "Checkpoint":
    """Read a checkpoint from a file or the Hub. `tokenizer`, a folder or Hub name, replaces its own."""
    path = Path(name)
    on_hub = not path.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)+", name)
    if not on_hub:
        check_checkpoint_exists(path)
    with tempfile.TemporaryDirectory() as work:
        if on_hub:
            path = hub_client.download(name, Path(work))
        from src.checkpoints.reading import read_checkpoint

        read = read_checkpoint(path)
        if on_hub:
            read.path, read.published = Path(name), name if read.published else None
        if tokenizer is not None:
            read.tokenizer = read_tokenizer(tokenizer, read.config, Path(work, "tokenizer"))
    return read


def write_proved(checkpoint: "Checkpoint", out: Path, scores: dict[str, Any] | None = None) -> None:
    """Write a complete folder with its card and its proof, or nothing at all."""
    from src.publish import folder as hub_folder
    from src.publish.card import model_card

    with hub_folder.new_folder(out) as unfinished:
        hub_folder.write(checkpoint, unfinished)
        (unfinished / CARD).write_text(model_card(checkpoint, out.name, scores), encoding="utf-8")
        difference = hub_folder.prove(checkpoint, unfinished)
    print(f"{out} gives the checkpoint's logits in plain transformers (largest difference {difference:.1e})")


def read_tokenizer(name: str, config: dict[str, Any], work: Path) -> dict[str, dict[str, Any]]:
    """Return a tokenizer's files in a checkpoint's format. Raises UserError if it cannot be loaded or does not fit."""
    from src.data.tokenizers import load_tokenizer

    size = config["vocab_size"]
    tokenizer = load_tokenizer(name, model_max_length=config["max_position_embeddings"])
    if len(tokenizer) > size:
        many = f"{len(tokenizer)} tokens, but the model's vocabulary is {size}"
        raise UserError(f"--tokenizer {name} has {many}; give the tokenizer that it was trained with")
    tokenizer.save_pretrained(work)
    contents = {path: json.loads(path.read_text("utf-8")) for path in work.glob("*.json")}
    contents |= {path: path.read_bytes() for path in work.iterdir() if path not in contents}
    return {path.name: {"file_extension": path.suffix, "content": content} for path, content in contents.items()}

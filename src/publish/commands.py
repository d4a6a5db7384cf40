"""Export, verify, push and import Hub folders. Paths are checked before torch and transformers are imported."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from src.checkpoints.remote import fetch, is_remote
from src.checkpoints.safe_load import check_checkpoint_exists
from src.cli import log
from src.errors import UserError, first_line, reason
from src.files import file_digest, write_json
from src.publish.card import model_card, read_scores

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint

CARD = "README.md"
EMBEDDING = "LionEmbeddingModel"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")  # checkpoint suffixes
DENIED = {
    401: "the token is missing or not valid",
    403: "the token does not permit that",
    404: "the repository does not exist or is private",
}
PROOF = "proof.json"  # the digests of the files that were compared with the checkpoint; push reads it
PUBLISHED = (".jinja", ".jpg", ".json", ".md", ".model", ".png", ".py", ".safetensors", ".svg", ".txt")  # no pickles


def export(
    checkpoint: Path | str,
    out: Path,
    glue: Path | None = None,
    tokenizer: str | None = None,
    published: bool = False,
    max_seq_length: int | None = None,
) -> None:
    """Write a Hub folder, verify it, then name it `out`. `published`: by the paper's authors; `max_seq_length`: of
    texts in sentence-transformers. Raises UserError."""
    if "." in out.name:
        raise UserError(f"--out {out} has a dot in its name, so transformers cannot load its code; choose another name")
    if out.exists():
        raise UserError(f"--out {out} already exists; choose another folder")
    if not published and not is_remote(checkpoint):
        _check_exists(fetch(str(checkpoint), "--checkpoint"))
    scores = None if glue is None else read_scores(glue)
    read = open_checkpoint(str(checkpoint), tokenizer)
    if bool(read.published) != published:
        whose = "the paper's authors; use `hub.py import`" if read.published else "this project; use `hub.py export`"
        raise UserError(f"{checkpoint} is a checkpoint of {whose}")
    if max_seq_length is not None:
        set_limit(read, max_seq_length)
    from src.publish import folder as hub_folder

    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        hub_folder.write(read, unfinished)
        (unfinished / CARD).write_text(model_card(read, out.name, scores), encoding="utf-8")
        difference = prove(read, unfinished)
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out} cannot be written ({reason(error)}); choose another or free space") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out} gives the checkpoint's {outputs(read)} in plain transformers (largest difference {difference:.1e})")
    if published and read.reads == "texts" and not read.tokenizer:
        log.info(f"{out} has no tokenizer, since the checkpoint has none; import again with --tokenizer to add one")


def outputs(read: "Checkpoint") -> str:
    """What a model computes, in words."""
    return "vectors" if read.class_name == EMBEDDING else "logits"


def set_limit(read: "Checkpoint", limit: int) -> None:
    """Change how long the texts of an embedding model are. Raises UserError."""
    from src.publish.inputs import max_seq_length

    key, config = f"--max_seq_length {limit}", read.config
    if read.class_name != EMBEDDING:
        raise UserError(f"{key} is for a checkpoint of embed.py, and {read.path} is none; omit it")
    if limit < (trained := max_seq_length(read)):
        shorter = "set max_seq_length in sentence-transformers for shorter texts"
        raise UserError(f"{key} is less than the {trained} tokens of training; omit it, and {shorter}")
    if config.has_positions and limit > config.max_position_embeddings:
        raise UserError(f"{key}: {read.path} has {config.max_position_embeddings} position embeddings; lower it")
    read.embedding["max_seq_len"] = limit


def verify(checkpoint: str, folder: Path, tokenizer: str | None = None, python: str = sys.executable) -> None:
    """Compare a folder with its checkpoint and print the largest difference. Raises UserError if they differ."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give a folder that `hub.py export` wrote")
    read = open_checkpoint(checkpoint, tokenizer)
    from src.publish import folder as hub_folder

    difference = hub_folder.verify(read, folder, python)
    print(f"{folder} gives the checkpoint's {outputs(read)} (largest difference {difference:.1e})")


def push(
    folder: Path,
    repo_id: str,
    checkpoint: str | None = None,
    private: bool = False,
    revision: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Upload a folder that gives the checkpoint's logits, in one commit; resumes if interrupted. Raises UserError."""
    if checkpoint is None:
        check_proof(folder)
    else:
        prove(open_checkpoint(checkpoint, tokenizer), folder)
    from huggingface_hub import CommitOperationAdd, HfApi

    api, own_name = HfApi(), folder.resolve().name
    with hub_errors(repo_id, "", "push again to resume"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True)  # a name without ORG/ gets the user's namespace
        if revision is not None:
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        contents = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        if CARD in contents:  # its usage lines load the folder: on the Hub by its name there
            usage = rf'(model=|from_pretrained\(|SentenceTransformer\()"{re.escape(own_name)}"'
            card = contents[CARD].read_text("utf-8")
            contents[CARD] = re.sub(usage, rf'\1"{repo.repo_id}"', card).encode()
        files = [CommitOperationAdd(name, content) for name, content in contents.items()]
        commit = api.create_commit(repo.repo_id, files, commit_message=f"Upload {own_name}", revision=revision)
    print(f"{folder} is at {repo} ({revision or 'main'}, commit {commit.oid[:7]})")


def _check_exists(path: Path) -> None:
    """Raise UserError unless there is a checkpoint, or a folder with a model."""
    if not (path / "config.json").is_file():
        check_checkpoint_exists(path)


def open_checkpoint(name: str, tokenizer: str | None = None) -> "Checkpoint":
    """Read a checkpoint from a file, from a folder that transformers saved, or from the Hub. `tokenizer`, a folder or
    Hub name, replaces its own."""
    path = fetch(name, "--checkpoint")
    on_hub = not path.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)+", name)
    with tempfile.TemporaryDirectory() as work:
        if on_hub:
            path = download(name, Path(work))
        _check_exists(path)
        from src.checkpoints.reading import read_checkpoint, read_saved

        read = read_saved(path) if path.is_dir() else read_checkpoint(path)
        read.report_guesses()
        if on_hub:
            read.path, read.published = Path(name), name if read.published else None
        if tokenizer is not None:
            if read.reads != "texts":
                raise UserError(f"--tokenizer {tokenizer}: {name} reads {read.reads}; omit it")
            from src.data.tokenizers import load_tokenizer

            loaded = load_tokenizer(tokenizer, model_max_length=read.config.max_position_embeddings)
            if len(loaded) > (size := read.config.vocab_size):
                many = f"{len(loaded)} tokens, but the model's vocabulary is {size}"
                raise UserError(f"--tokenizer {tokenizer} has {many}; give the tokenizer that it was trained with")
            loaded.save_pretrained(f"{work}/tokenizer")
            read.tokenizer = {}
            for file in Path(work, "tokenizer").iterdir():
                content = json.loads(file.read_text("utf-8")) if file.suffix == ".json" else file.read_bytes()
                read.tokenizer[file.name] = {"file_extension": file.suffix, "content": content}  # as Composer does
    return read


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
        raise UserError(f"{folder}: {', '.join(changed)} changed, were added or were removed since export; {advice}")


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
            raise UserError(f"{path} might execute code when loaded; remove it (published: {', '.join(PUBLISHED)})")
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = file_digest(path)
    return {name: digest for name, digest in found.items() if name not in (CARD, PROOF)}


def download(name: str, out: Path) -> Path:
    """Download the checkpoint ORG/NAME[/FILE] into `out`. Raises UserError if there is none, or several."""
    from huggingface_hub import HfApi

    org, repo, *rest = name.split("/")
    api, repo_id = HfApi(), f"{org}/{repo}"
    with hub_errors(repo_id, f"--checkpoint {name} is not a file, and ", "try again, or give a file"):
        files = [file.rfilename for file in api.model_info(repo_id).siblings]
        found = [file for file in files if file.endswith(PICKLES) and (not rest or file == "/".join(rest))]
        if len(found) != 1:
            names = f"; give one as {repo_id}/FILE: {', '.join(found)}" if found else ""
            raise UserError(f"--checkpoint {name}: the repository has {len(found) or 'no'} checkpoints{names}")
        log.info(f"downloading {found[0]} of {repo_id} from the Hub")
        return Path(api.hf_hub_download(repo_id, found[0], local_dir=out))


@contextmanager
def hub_errors(repo_id: str, prefix: str, advice: str) -> Iterator[None]:
    """Turn errors of the Hub and its client into UserError. The message never contains the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
    from requests import RequestException

    try:
        yield
    except (HFValidationError, OfflineModeIsEnabled) as error:
        raise UserError(f"{prefix}{repo_id} cannot be used: {first_line(error)}") from None
    except (RequestException, RuntimeError) as error:  # hf_xet, which sends large files, raises the latter
        response = getattr(error, "response", None)
        if response is None:
            problem = f"the Hub at {constants.ENDPOINT} could not be reached ({type(error).__name__})"
        else:
            problem = f"the Hub refused {repo_id} ({DENIED.get(response.status_code, first_line(error))})"
            if response.status_code in DENIED:
                advice = "check the name, and set HF_TOKEN to a token with access"
        raise UserError(f"{prefix}{problem}; {advice}") from None

"""Composer checkpoint ↔ Hub folder.

python src/hub.py export --checkpoint runs/lion-s-base/latest-rank0.pt --out my-model
python src/hub.py verify --checkpoint runs/lion-s-base/latest-rank0.pt --folder my-model
python src/hub.py push   --folder my-model --repo_id ORG/NAME
python src/hub.py import --checkpoint LIONS-EPFL/LION-S-base-mlm --out my-model --tokenizer bert-base-uncased
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.checkpoints.reading import Checkpoint, read_checkpoint
from src.cli import log
from src.errors import UserError, first_line
from src.publish import folder as hub_folder
from src.publish.card import model_card, read_scores
from src.publish.folder import CARD

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")  # what a checkpoint may be called


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="hub.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{export,verify,push,import}")
    export_ = commands.add_parser("export", help="write a checkpoint as a folder that plain transformers loads")
    export_.add_argument("--checkpoint", type=Path, required=True, help="checkpoint that main.py or glue.py saved")
    export_.add_argument("--out", type=Path, required=True, help="folder to write; must not exist yet")
    export_.add_argument("--glue", type=Path, help="folder of a glue.py run, whose scores go into the model card")
    verify_ = commands.add_parser("verify", help="compare a folder with the checkpoint it was made from")
    verify_.add_argument("--checkpoint", required=True, help="the checkpoint: a file, or ORG/NAME on the Hub")
    verify_.add_argument("--folder", type=Path, required=True, help="what export or import wrote")
    verify_.add_argument("--tokenizer", help="what import was given as its tokenizer")
    verify_.add_argument(
        "--python", default=sys.executable, help="the Python of another environment, to load the folder there"
    )
    push_ = commands.add_parser("push", help="upload a folder to the Hugging Face Hub")
    push_.add_argument("--folder", type=Path, required=True, help="what export wrote; README.md may have changed since")
    push_.add_argument("--repo_id", required=True, help="ORG/NAME on the Hub; made if it is not there")
    push_.add_argument("--checkpoint", help="verify against it first, where files changed after export")
    push_.add_argument("--tokenizer", help="with --checkpoint: what import was given as its tokenizer")
    push_.add_argument("--private", action="store_true", help="make the repository private, if it is not there yet")
    push_.add_argument("--revision", help="branch to push to; made if it is not there (default: main)")
    import_ = commands.add_parser(
        "import", help="write a checkpoint published by the paper's authors as a folder of ours"
    )
    import_.add_argument(
        "--checkpoint", required=True, help="their Composer checkpoint: a file, or ORG/NAME on the Hub"
    )
    import_.add_argument("--out", type=Path, required=True, help="folder to write; must not exist yet")
    import_.add_argument(
        "--tokenizer", help="folder or Hub name of the tokenizer to put beside the weights, instead of the checkpoint's"
    )
    arguments = vars(parser.parse_args(argv))
    command = {"export": export, "verify": verify, "push": push, "import": import_published}[arguments.pop("command")]
    command(**arguments)


def export(checkpoint: Path, out: Path, glue: Path | None = None) -> None:
    """Write a Hub folder and verify it; it appears under its name only if it gives the checkpoint's logits."""
    hub_folder.check_name(out)
    read = read_checkpoint(checkpoint)
    if read.published:
        raise UserError(f"{checkpoint} is a checkpoint of the paper's authors; take `hub.py import` for it")
    write_proved(read, out, None if glue is None else read_scores(glue))


def verify(checkpoint: str, folder: Path, tokenizer: str | None = None, python: str = sys.executable) -> None:
    """Compare a folder with its checkpoint and print the largest difference. Raises UserError where they differ."""
    difference = hub_folder.verify(open_checkpoint(checkpoint, tokenizer), folder, python)
    print(f"{folder} gives the checkpoint's logits (largest difference {difference:.1e})")


def import_published(checkpoint: str, out: Path, tokenizer: str | None = None) -> None:
    """Write a checkpoint published by the paper's authors as an ordinary folder of ours. Every tensor has to have a place."""
    hub_folder.check_name(out)
    read = open_checkpoint(checkpoint, tokenizer)
    if not read.published:
        raise UserError(f"{checkpoint} is a checkpoint of ours; take `hub.py export` for it")
    write_proved(read, out)
    if not read.tokenizer:
        log.info(f"{out} has no tokenizer, as the checkpoint has none; to add one, import again with --tokenizer")


def open_checkpoint(name: str, tokenizer: str | None = None) -> Checkpoint:
    """A checkpoint that lies here or on the Hub; with the `tokenizer` of that folder or Hub name, if given, as its own."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(name)
        if not path.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)+", name):
            path = download(name, Path(work))
        read = read_checkpoint(path)
        if path != Path(name):
            read.path, read.published = Path(name), name if read.published else None
        if tokenizer is not None:
            read.tokenizer = read_tokenizer(tokenizer, read.config, Path(work, "tokenizer"))
    return read


def write_proved(checkpoint: Checkpoint, out: Path, scores: dict[str, Any] | None = None) -> None:
    """Write a folder with its card and its proof, whole or not at all."""
    with hub_folder.whole(out) as unfinished:
        hub_folder.write(checkpoint, unfinished)
        (unfinished / CARD).write_text(model_card(checkpoint, out.name, scores), encoding="utf-8")
        difference = hub_folder.prove(checkpoint, unfinished)
    print(f"{out} gives the checkpoint's logits in plain transformers (largest difference {difference:.1e})")


def push(
    folder: Path,
    repo_id: str,
    checkpoint: str | None = None,
    private: bool = False,
    revision: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Upload a folder whose files are those that were compared with the checkpoint. Safe to repeat.

    Files that the Hub has already are not sent again, so an upload that broke off goes on. Raises UserError for a folder
    that is not what export proved, and for a Hub that cannot be reached or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    names = hub_folder.files(folder)
    if checkpoint is None:
        hub_folder.check_proof(folder)
    else:
        hub_folder.prove(open_checkpoint(checkpoint, tokenizer), folder)
        names = hub_folder.files(folder)
    api = HfApi()
    with hub_errors(repo_id, "", "push again, it goes on where it stopped"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True)  # a name without ORG/ gets the user's
        if revision is not None:
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        if CARD in names:
            name_in_card(folder, repo.repo_id)
        commit = api.create_commit(
            repo.repo_id,
            operations=[CommitOperationAdd(name, folder / name) for name in names],
            commit_message=f"Upload {folder.resolve().name}",
            revision=revision,
        )
    print(f"{folder} is at {repo} ({revision or 'main'}, commit {commit.oid[:7]})")


def name_in_card(folder: Path, repo_id: str) -> None:
    """Have the lines of use in a model card load the model by its name on the Hub, where they name the folder."""
    card = (folder / CARD).read_text(encoding="utf-8")
    for before in ("model=", "from_pretrained("):
        card = card.replace(f'{before}"{folder.resolve().name}"', f'{before}"{repo_id}"')
    (folder / CARD).write_text(card, encoding="utf-8")


def download(name: str, out: Path) -> Path:
    """The checkpoint ORG/NAME[/FILE] of the Hub, as a file below `out`. Raises UserError where there is not just one."""
    from huggingface_hub import HfApi

    org, repo, *rest = name.split("/")
    api = HfApi()
    with hub_errors(f"{org}/{repo}", f"--checkpoint {name} is no file here, and ", "try again, or name a file"):
        files = [file.rfilename for file in api.model_info(f"{org}/{repo}").siblings or []]
        found = [file for file in files if file.endswith(PICKLES)]
        if rest:
            found = [file for file in found if file == "/".join(rest)]
        if len(found) != 1:
            names = f"; name one as {org}/{repo}/FILE: {', '.join(found)}" if found else ""
            raise UserError(f"--checkpoint {name}: the Hub has {len(found) or 'no'} checkpoints there{names}")
        log.info(f"fetching {found[0]} of {org}/{repo} from the Hub")
        return Path(api.hf_hub_download(f"{org}/{repo}", found[0], local_dir=out))


def read_tokenizer(name: str, config: dict[str, Any], work: Path) -> dict[str, dict[str, Any]]:
    """The files of a tokenizer as a checkpoint holds them. Raises UserError where it cannot be loaded or does not fit."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, model_max_length=config["max_position_embeddings"], trust_remote_code=False
        )
    except Exception as error:  # whatever transformers, tokenizers and sentencepiece raise
        reason = "the folder holds no tokenizer" if Path(name).is_dir() else first_line(error)
        raise UserError(f"--tokenizer: cannot load {name} ({reason}); give a folder with tokenizer.json") from None
    if len(tokenizer) > config["vocab_size"]:
        raise UserError(f"--tokenizer {name} has {len(tokenizer)} tokens, and the model's vocabulary is {config['vocab_size']}; name the one it was trained with")  # fmt: skip
    tokenizer.save_pretrained(work)
    return {
        path.name: {
            "file_extension": path.suffix,
            "content": json.loads(path.read_text("utf-8")) if path.suffix == ".json" else path.read_bytes(),
        }
        for path in work.iterdir()
    }


@contextmanager
def hub_errors(repo_id: str, prefix: str, way_out: str) -> Iterator[None]:
    """What the Hub and its client raise, as a UserError. Whose messages never hold the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )
    from requests import RequestException

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{prefix}{repo_id} is no name of the Hub: {error}") from None
    except LocalTokenNotFoundError:
        raise UserError("no token for the Hub; `huggingface-cli login`, or set HF_TOKEN to one that may write") from None  # fmt: skip
    except OfflineModeIsEnabled:
        raise UserError(f"{prefix}the Hub is not asked for {repo_id} while HF_HUB_OFFLINE is set; unset it") from None
    except LocalEntryNotFoundError:  # what the client calls a connection that fails in a download
        raise UserError(f"{prefix}the Hub at {constants.ENDPOINT} broke off; {way_out}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reasons = {
            401: "the token is missing or not valid",
            403: "the token may not do that there",
            404: "there is none of that name, or it is private",
        }
        if status in reasons:
            raise UserError(f"{prefix}the Hub refused {repo_id} ({reasons[status]}); check the name, and set HF_TOKEN to one that may") from None  # fmt: skip
        raise UserError(f"{prefix}the Hub refused {repo_id}: {first_line(error)}; {way_out}") from None
    except (RequestException, RuntimeError) as error:  # hf_xet, which sends large files, raises the latter
        raise UserError(f"{prefix}the Hub at {constants.ENDPOINT} could not be reached ({type(error).__name__}); {way_out}") from None  # fmt: skip

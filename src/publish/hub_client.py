"""Upload to and download from the Hugging Face Hub, reporting each error in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from src.cli import log
from src.errors import UserError, first_line

CARD = "README.md"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")  # checkpoint suffixes
DENIED = {
    401: "the token is missing or not valid",
    403: "the token does not permit that",
    404: "the repository does not exist or is private",
}


def upload(folder: Path, repo_id: str, private: bool, revision: str | None) -> None:
    """Upload a folder in one commit and print its URL. Raises UserError."""
    from huggingface_hub import HfApi

    api, card, own_name = HfApi(), folder / CARD, folder.resolve().name
    with hub_errors(repo_id, "", "push again to resume"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True)  # a name without ORG/ gets the user's namespace
        if revision is not None:
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        if card.is_file():  # its usage lines load the folder: from now on by the name on the Hub
            text = card.read_text(encoding="utf-8")
            for before in ("model=", "from_pretrained("):
                text = text.replace(f'{before}"{own_name}"', f'{before}"{repo.repo_id}"')
            card.write_text(text, encoding="utf-8")
        target = {"repo_id": repo.repo_id, "revision": revision}
        commit = api.upload_folder(folder_path=folder, commit_message=f"Upload {own_name}", **target)
    print(f"{folder} is at {repo} ({revision or 'main'}, commit {commit.oid[:7]})")


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
        elif response.status_code in DENIED:
            problem = f"the Hub refused {repo_id} ({DENIED[response.status_code]})"
            advice = "check the name, and set HF_TOKEN to a token with access"
        else:
            problem = f"the Hub refused {repo_id} ({first_line(error)})"
        raise UserError(f"{prefix}{problem}; {advice}") from None

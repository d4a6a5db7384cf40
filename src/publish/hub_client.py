"""Upload to and download from the Hugging Face Hub, reporting each error in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from src.cli import log
from src.errors import UserError, first_line
from src.publish.proof import CARD

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")  # checkpoint suffixes


def upload(folder: Path, names: list[str], repo_id: str, private: bool, revision: str | None) -> None:
    """Upload files of a folder in one commit and print their URL. Raises UserError."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with hub_errors(repo_id, "", "push again to resume"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True)  # a name without ORG/ gets the user's namespace
        if revision is not None:
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        if CARD in names:
            set_name_in_card(folder, repo.repo_id)
        commit = api.create_commit(
            repo.repo_id,
            operations=[CommitOperationAdd(name, folder / name) for name in names],
            commit_message=f"Upload {folder.resolve().name}",
            revision=revision,
        )
    print(f"{folder} is at {repo} ({revision or 'main'}, commit {commit.oid[:7]})")


def set_name_in_card(folder: Path, repo_id: str) -> None:
    """Replace the folder's name in the model card's usage lines with the name on the Hub."""
    card = (folder / CARD).read_text(encoding="utf-8")
    for before in ("model=", "from_pretrained("):
        card = card.replace(f'{before}"{folder.resolve().name}"', f'{before}"{repo_id}"')
    (folder / CARD).write_text(card, encoding="utf-8")


def download(name: str, out: Path) -> Path:
    """Download the checkpoint ORG/NAME[/FILE] into `out`. Raises UserError if there is none, or several."""
    from huggingface_hub import HfApi

    org, repo, *rest = name.split("/")
    api = HfApi()
    with hub_errors(f"{org}/{repo}", f"--checkpoint {name} is not a file, and ", "try again, or give a file"):
        files = [file.rfilename for file in api.model_info(f"{org}/{repo}").siblings or []]
        found = [file for file in files if file.endswith(PICKLES) and (not rest or file == "/".join(rest))]
        if len(found) != 1:
            names = f"; give one as {org}/{repo}/FILE: {', '.join(found)}" if found else ""
            raise UserError(f"--checkpoint {name}: the repository has {len(found) or 'no'} checkpoints{names}")
        log.info(f"downloading {found[0]} of {org}/{repo} from the Hub")
        return Path(api.hf_hub_download(f"{org}/{repo}", found[0], local_dir=out))


@contextmanager
def hub_errors(repo_id: str, prefix: str, advice: str) -> Iterator[None]:
    """Turn errors of the Hub and its client into UserError. The message never contains the token."""
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
        raise UserError(f"{prefix}{repo_id} is not a name on the Hub: {error}") from None
    except LocalTokenNotFoundError:
        raise UserError("no token for the Hub; run `huggingface-cli login` or set HF_TOKEN to a write token") from None
    except OfflineModeIsEnabled:
        raise UserError(f"{prefix}{repo_id} cannot be reached while HF_HUB_OFFLINE is set; unset it") from None
    except LocalEntryNotFoundError:  # the connection failed during a download
        raise UserError(f"{prefix}the connection to {constants.ENDPOINT} was lost; {advice}") from None
    except HfHubHTTPError as error:
        reasons = {
            401: "the token is missing or not valid",
            403: "the token does not permit that",
            404: "the repository does not exist or is private",
        }
        reason = reasons.get(error.response.status_code if error.response is not None else None)
        if reason is not None:
            advice = "check the name, and set HF_TOKEN to a token with access"
        raise UserError(f"{prefix}the Hub refused {repo_id} ({reason or first_line(error)}); {advice}") from None
    except (RequestException, RuntimeError) as error:  # hf_xet, which sends large files, raises the latter
        unreachable = f"the Hub at {constants.ENDPOINT} could not be reached ({type(error).__name__})"
        raise UserError(f"{prefix}{unreachable}; {advice}") from None

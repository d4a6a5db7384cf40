"""Files in an object store, through Composer's clients for s3://, gs:// and oci://, or in a folder of another disk."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from src.cli import log
from src.errors import UserError, first_line
from src.files import LATEST, follow, looks_like_path

WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")  # how the names of files end; others are of folders
FETCHED = "LION_BERT_FETCHED"  # a variable: what this process and those that it starts find downloaded, by address
_downloads: list[tempfile.TemporaryDirectory] = []  # deleted when the process ends


def is_remote(name: object) -> bool:
    """Return whether a name is an address of an object store."""
    return "://" in str(name)


def check_exists(name: str | None, key: str) -> None:
    """Raise UserError, naming the `key` that holds it, for a name that is clearly a path where nothing is."""
    if name is None or is_remote(name) or follow(Path(name)).exists():
        return
    if Path(name).suffix in WEIGHTS or looks_like_path(name):
        raise UserError(f"{key}: {name} is not a file or folder; fix its path")


class Store:
    """A folder in an object store, such as s3://bucket/runs/base, or of a disk. Methods raise what the client does."""

    def __init__(self, address: str, key: str):
        """Raises UserError, naming the `key` that holds the address, if its kind is unknown."""
        self.address, self.client, self.prefix = address.rstrip("/"), None, ""
        if is_remote(address):
            from composer.utils import maybe_create_object_store_from_uri, parse_uri

            try:
                self.client = maybe_create_object_store_from_uri(address)
            except Exception as error:  # whatever the client raises without its package or credentials
                problem = f"{key}: {address} cannot be opened ({first_line(error)})"
                raise UserError(f"{problem}; use s3://, gs:// or oci://, and set the credentials") from None
            if path := parse_uri(self.address)[2]:
                self.prefix = f"{path}/"
        elif re.match(r"\w+:/", address):
            raise UserError(f"{key}: {address} lacks a slash; write {address.replace(':/', '://', 1)}")
        elif Path(address).is_file():
            raise UserError(f"{key}: {address} is a file; give a folder")

    def names(self) -> list[str]:
        """Return the names of the files directly in this folder."""
        if self.client is None:
            folder = Path(self.address)
            return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
        found = (name.removeprefix(self.prefix) for name in self.client.list_objects(self.prefix))
        return sorted(name for name in found if name and "/" not in name)

    def size(self, name: str) -> int:
        """Return the bytes of a file in this folder."""
        if self.client is not None:
            return self.client.get_object_size(f"{self.prefix}{name}")
        return Path(self.address, name).stat().st_size

    def upload(self, path: Path, name: str) -> None:
        """Write a file under a name in this folder, where it appears once it is complete."""
        if self.client is not None:
            self.client.upload_object(f"{self.prefix}{name}", str(path))
            return
        target = Path(self.address, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, unfinished := target.with_name(f"{name}.unfinished"))
        unfinished.replace(target)

    def download(self, name: str, path: Path) -> None:
        """Write a file of this folder to a path, where it appears once it is complete."""
        unfinished = path.with_name(f"{path.name}.unfinished").resolve()  # Composer's client for oci:// needs this
        if self.client is not None:
            self.client.download_object(f"{self.prefix}{name}", str(unfinished), overwrite=True)
        else:
            shutil.copyfile(Path(self.address, name), unfinished)
        unfinished.replace(path)


def fetch(name: str, key: str) -> Path:
    """Return the path of a checkpoint, which is a run folder's latest, or that of a folder with config.json. What is in
    an object store is downloaded, once, for as long as this process runs. Raises UserError, naming the `key` that holds
    the name."""
    if not is_remote(name):
        path = follow(Path(name))
        is_run = not (path / "config.json").is_file() and (path / LATEST).exists()
        return follow(path / LATEST) if is_run else path
    fetched = json.loads(os.environ.get(FETCHED, "{}"))
    if name not in fetched or not Path(fetched[name]).exists():
        fetched[name] = str(_download(name, key))
        os.environ[FETCHED] = json.dumps(fetched)
    return Path(fetched[name])


def _download(name: str, key: str) -> Path:
    parent, _, last = name.rstrip("/").rpartition("/")
    is_file = Path(last).suffix in WEIGHTS
    store = Store(parent if is_file else name, key)
    _downloads.append(work := tempfile.TemporaryDirectory())
    folder = Path(work.name)
    try:
        names = store.names()
        wanted = [last] if is_file else names if "config.json" in names else [LATEST]
        if missing := set(wanted) - set(names):
            raise UserError(f"{key}: {store.address} has no file {min(missing)}; fix the address")
        log.info(f"downloading {name}")
        for file in wanted:
            store.download(file, folder / file)
        if wanted[0] == LATEST and (named := follow(folder / LATEST)).name != LATEST:
            store.download(named.name, named)
    except UserError:
        raise
    except Exception as error:  # whatever the client raises
        problem = f"{key}: {name} cannot be downloaded ({first_line(error)})"
        raise UserError(f"{problem}; fix the address or the credentials, or free disk space") from None
    return follow(folder / wanted[0]) if len(wanted) == 1 else folder


def checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a run's checkpoint, or None for other files."""
    found = re.fullmatch(r"ep\d+-ba(\d+)-rank0\.pt", name)
    return int(found[1]) if found else None

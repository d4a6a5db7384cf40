"""Check a folder of splits, as src/convert_dataset.py writes it. Imports neither torch nor streaming."""

import json
from pathlib import Path

from src.errors import UserError

CONVERT = "copy the split again, or convert it again with --overwrite"


def check_split(key: str, local: Path, split: str) -> None:
    """Raise UserError unless a folder has a split with all its shards. `key` is what the user set."""
    folder = local / split
    if not (folder / "index.json").is_file():
        command = f"src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits {split} --out_root {local}"
        if not local.is_dir():
            raise UserError(f"{key}: {local} does not exist; write shards to it, e.g. with `python {command}`")
        splits = sorted(path.parent.name for path in local.glob("*/index.json"))
        found = f"its splits are {', '.join(splits)}" if splits else f"{local} has no finished split"
        raise UserError(f"{key}: {folder} holds no shards ({found}); write them, e.g. with `python {command}`")
    try:
        shards = json.loads((folder / "index.json").read_text())["shards"]
        names = [
            [(shard[form] or shard["raw_data"])["basename"] for form in ("raw_data", "zip_data")] for shard in shards
        ]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'index.json'} is corrupt; {CONVERT}") from None
    missing = [stored for raw, stored in names if not ((folder / raw).is_file() or (folder / stored).is_file())]
    if missing:
        raise UserError(f"{folder}: {len(missing)} of {len(names)} shards are missing ({missing[0]}, …); {CONVERT}")

"""Composer checkpoint ↔ Hub folder.

python src/hub.py export --checkpoint runs/lion-s-base/latest-rank0.pt --out my-model
python src/hub.py verify --checkpoint runs/lion-s-base/latest-rank0.pt --folder my-model
python src/hub.py push   --folder my-model --repo_id ORG/NAME
python src/hub.py import --checkpoint LIONS-EPFL/LION-S-base-mlm --out my-model --tokenizer bert-base-uncased
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from src.cli import run
from src.publish import commands


def main(argv: list[str]) -> None:
    parser = ArgumentParser(prog="hub.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(required=True, metavar="{export,verify,push,import}")

    def subcommand(name: str, function, help: str):
        added = subcommands.add_parser(name, help=help)
        added.set_defaults(function=function)
        return added.add_argument

    add = subcommand("export", commands.export, "write a checkpoint as a folder that plain transformers loads")
    add("--checkpoint", required=True, help="checkpoint, or folder of a run or of save_pretrained; also s3://…")
    add("--out", type=Path, required=True, help="folder to write; must not exist yet")
    add("--glue", type=Path, help="folder of a glue.py run, whose scores go into the model card")
    add("--max_seq_length", type=int, help="of texts in sentence-transformers (default: max_seq_len of embed.py)")
    add = subcommand("verify", commands.verify, "compare a folder with the checkpoint it was written from")
    add("--checkpoint", required=True, help="the checkpoint: a file, the folder of a run, or ORG/NAME on the Hub")
    add("--folder", type=Path, required=True, help="folder that export or import wrote")
    add("--tokenizer", help="the --tokenizer of import")
    add("--python", default=sys.executable, help="Python of another environment, to load the folder there")
    add = subcommand("push", commands.push, "upload a folder to the Hugging Face Hub")
    add("--folder", type=Path, required=True, help="folder that export wrote; its README.md may be edited")
    add("--repo_id", required=True, help="ORG/NAME on the Hub; created if it does not exist")
    add("--checkpoint", help="checkpoint to verify the folder against first; required if files changed after export")
    add("--tokenizer", help="with --checkpoint: the --tokenizer of import")
    add("--private", action="store_true", help="create a private repository")
    add("--revision", help="branch to push to; created if it does not exist (default: main)")
    add = subcommand("import", partial(commands.export, published=True), "export a published LION, Hydra or DeiT")
    add(
        "--checkpoint",
        required=True,
        help="the authors' checkpoint: a file, .pt, .pth or .safetensors, or ORG/NAME on the Hub",
    )
    add("--out", type=Path, required=True, help="folder to write; must not exist yet")
    add("--tokenizer", help="folder or Hub name of the tokenizer to use instead of the checkpoint's")
    arguments = vars(parser.parse_args(argv))
    arguments.pop("function")(**arguments)


if __name__ == "__main__":
    run(main)

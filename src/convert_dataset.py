"""Write text or labelled images as MDS shards: a dataset of the Hugging Face Hub, or your own files.

python src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits train_small val --out_root ./my-copy-c4
python src/convert_dataset.py --data_files 'texts/*.jsonl.gz' --val_fraction 0.01 --out_root ./my-texts
zcat texts/*.gz | python src/convert_dataset.py --data_files - --splits train --out_root ./my-texts
python src/convert_dataset.py --images ./imagenet --out_root ./my-imagenet

By default, shards hold text, which is tokenized during training. Shards of tokens only need to be read:

python src/convert_dataset.py ... --tokenizer bert-base-uncased --concat_tokens 128   documents end to end, in full rows
python src/convert_dataset.py ... --tokenizer bert-base-uncased --max_seq_len 128     one row per document, truncated

An interrupted conversion resumes with the same command, and gives the same shards as an uninterrupted one.

Machines can share the work (any number of parts gives the same samples), and one of them joins the parts:

python src/convert_dataset.py ... --out_root ./my-texts --part I/8      for each I from 1 to 8
python src/convert_dataset.py --merge --out_root ./my-texts
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from src import cli
from src.data.convert import convert
from src.data.convert_images import convert_images
from src.data.merge import merge
from src.data.options import conversion_parser


def main(argv: list[str]) -> None:
    parser = conversion_parser(__doc__)
    options = parser.parse_args(argv)
    cli.check_alone("src/convert_dataset.py", "machines share the work by --part")
    options.splits = list(dict.fromkeys(options.splits))
    if options.merge:
        merge(options, [name for name, value in vars(options).items() if value != parser.get_default(name)])
    else:
        (convert if options.images is None else convert_images)(options)


if __name__ == "__main__":
    cli.run(main)

"""How far the heads of a model see: horizons of their decays, and where a token's output comes from.

    python -m src.horizons --checkpoint runs/lion-s-base/latest-rank0.pt --data_files 'texts/*.txt' --out horizons

A head's horizon is −1 / mean(log λ): the number of tokens after which its decay leaves 1/e of a state. The picture
also shows the horizons of a new model with the same configuration. The share of an output from beyond a distance d is
Σ |A_ij|·‖v_j‖ over the keys with |i − j| > d, divided by the sum over all keys, where A is the head's matrix and v are
its values. The gradient at a distance is that of the first token's final hidden state with respect to the embedding of
the token at that distance, relative to the gradient with respect to its own.
"""

import argparse
import itertools
import sys
from pathlib import Path

from src.cli import check_alone, log, run
from src.data.readers import find_files, read_batches
from src.errors import UserError
from src.files import check_writable, write_json
from src.horizons.report import draw, text
from src.jobs.report import writing


def main(argv: list[str]) -> None:
    check_alone("src.horizons")
    parser = argparse.ArgumentParser(
        "python -m src.horizons", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="a checkpoint of main.py or glue.py, a Hub folder, or ORG/NAME on the Hub")
    add(
        "--data_files", required=True, nargs="+", metavar="GLOB", help="text to read, in the formats of convert_dataset"
    )
    add("--text_column", default="text", metavar="NAME", help="column or key with the text (default: %(default)s)")
    add("--tokenizer", metavar="NAME", help="folder or Hub name; default: the checkpoint's own")
    add("--length", type=int, default=2048, help="tokens of a row; documents are joined to fill it (default: 2048)")
    add("--rows", type=int, default=4, help="rows to read (default: 4)")
    add("--out", type=Path, default=Path("horizons"), help="folder for horizons.json and .png (default: horizons)")
    options = parser.parse_args(argv)
    for name, least in (("length", 3), ("rows", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)} must be at least {least}")
    files = find_files(options.data_files)
    check_writable("--out", options.out)
    import torch

    from src.checkpoints.reading import load_all, read_pretrained
    from src.data.token_rows import token_rows
    from src.data.tokenizers import load_tokenizer
    from src.horizons.measure import measure, measure_horizons
    from src.lion import LionModel

    read = read_pretrained(options.checkpoint, "--checkpoint")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else read.load_tokenizer()
    if tokenizer is None:
        raise UserError(f"{options.checkpoint} has no tokenizer; name it as --tokenizer")
    if len(tokenizer) > read.config.vocab_size:
        problem = f"the tokenizer has {len(tokenizer)} tokens, but the model {read.config.vocab_size}"
        raise UserError(f"{problem}; name the tokenizer it was trained with as --tokenizer")
    tokenizer.model_max_length = sys.maxsize  # or it would warn of long texts, which are cut into rows
    model = LionModel(read.config, add_pooling_layer=False).eval()
    weights = {name: x for name, x in read.encoder().items() if not name.startswith("pooler.")}
    load_all(model, weights, options.checkpoint)
    length = options.length
    if read.config.has_positions and length > read.config.max_position_embeddings:
        length = read.config.max_position_embeddings
        log.info(f"rows of {length} tokens, the most that the model's position embeddings allow")
    texts = (text for path in files for batch in read_batches(path, options.text_column) for text in batch.texts)
    rows = list(itertools.islice(token_rows(texts, tokenizer, length), options.rows))
    if not rows:
        raise UserError(f"--data_files hold fewer than {length} tokens; give more text, or a smaller --length")
    torch.manual_seed(0)
    new = LionModel(read.config, add_pooling_layer=False).eval()
    result = {"checkpoint": options.checkpoint, "length": length, "rows": len(rows), **measure(model, rows)}
    result["initial_horizons"] = measure_horizons(new, rows[0])
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "horizons.json", result)
        draw(result, options.out / "horizons.png")
    print(f"\n{text(result)}\n\nresults  {options.out / 'horizons.json'}, {options.out / 'horizons.png'}")


if __name__ == "__main__":
    run(main)

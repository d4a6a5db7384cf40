"""`vision.py draw`: what one patch of a picture sees in each layer of a model."""

import argparse
from pathlib import Path

import torch

from src.checkpoints.reading import read_pretrained
from src.cli import check_alone, log
from src.data.image_transforms import Evaluation
from src.data.images import decode
from src.errors import UserError, reason
from src.training.trainer import silence_libraries
from src.vision import pictures
from src.vision.inference import add_image_size, add_model, check_rgb, resized, title_of


@torch.no_grad()
def draw(argv: list[str]) -> None:
    """Run the command. Raises UserError."""
    check_alone("vision.py draw")
    parser = argparse.ArgumentParser(
        "vision.py draw",
        description="Draw what one patch of a picture sees, by layer and head: attention.png, the normalized matrix; "
        "mask.png, the decays' part of it; and orders.png, the orders of patches, if there are two.",
        epilog="Example: python vision.py draw my-model picture.jpg --patch 7 7 --out pictures",
    )
    add_model(parser)
    add = parser.add_argument
    add("picture", metavar="PICTURE", help="a file")
    add("--patch", type=int, nargs=2, metavar=("ROW", "COLUMN"), help="from 0 (default: the middle)")
    add("--out", type=Path, default=Path("."), help="folder for the pictures (default: this one)")
    add_image_size(parser)
    options = parser.parse_args(argv)
    silence_libraries()
    checkpoint = read_pretrained(options.model, "MODEL", reads="images")
    check_rgb(checkpoint)
    try:
        content = Path(options.picture).read_bytes()
    except OSError as error:
        raise UserError(f"PICTURE {options.picture} cannot be read ({reason(error)}); name another file") from None
    settings = resized(checkpoint.processor, options.image_size, checkpoint)
    pixel_values = Evaluation(settings)(decode(content, options.picture))[None]
    config, model = checkpoint.config, checkpoint.build()
    grid = tuple(side // config.patch_size for side in pixel_values.shape[2:])
    patch = tuple(options.patch or (side // 2 for side in grid))
    if not all(0 <= place < side for place, side in zip(patch, grid)):
        raise UserError(f"--patch {patch[0]} {patch[1]} is outside the grid of {grid[0]} × {grid[1]} patches")
    name, place = title_of(options.model), f"the patch in row {patch[0]}, column {patch[1]}"
    where = patch, grid, config.num_prefix_tokens
    drawn = [options.out / "attention.png"]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        matrices = [
            matrix[0] for matrix in model(pixel_values, output_attentions=True, attention_form="full").attentions
        ]
        pictures.heads(matrices, *where, drawn[0], f"{name}: what {place} takes from each")
        if model.lion.layers[0].attention.log_decays(torch.zeros(1, 1, config.hidden_size)) is not None:
            drawn.append(options.out / "mask.png")
            pictures.heads(pictures.masks(model, pixel_values), *where, drawn[-1], f"{name}: the mask of {place}")
        if config.num_orders > 1:
            drawn.append(options.out / "orders.png")
            pictures.orders(*grid, drawn[-1])
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written ({reason(error)}); choose another folder") from None
    log.info(f"pictures {', '.join(map(str, drawn))}")

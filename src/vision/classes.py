"""The classes of data and of models, matched by name, or by number where names differ."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.errors import UserError

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint
    from src.data.images import Images


def labels_of(images: "Images", checkpoint: "Checkpoint", by_number: bool = False) -> Tensor:
    """Return the model's class for each of the data's, matched by name, or by number if the model's have no names or
    if asked to. Raises UserError if one is missing."""
    count, names = checkpoint.config.num_labels, checkpoint.classes
    if by_number or names is None or names == images.classes:  # in which a name may be there twice
        if len(images.classes) > count:
            raise UserError(f"{images.source} has {len(images.classes)} classes, and the model {count}")
        if (name := moved(names or [], images.classes)) is not None:
            where = f"{images.classes.index(name)} in {images.source}, and {names.index(name)} in the model"
            to_do = "omit it to match by name, or rename the data's classes"
            raise UserError(f"--by_number: the class {name} has number {where}; {to_do}")
        return torch.arange(len(images.classes))
    if missing := [name for name in images.classes if name not in names]:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        known = "the class" if len(missing) == 1 else "the classes"
        unknown = f"{checkpoint.path} does not know {known} {shown} of {images.source}"
        raise UserError(f"{unknown}; name other data, or give --by_number if only the names differ")
    return torch.tensor([names.index(name) for name in images.classes])


def moved(names: list[str], classes: list[str]) -> str | None:
    """Return the first of the data's classes whose number has another name in a model that knows the class; None if
    there is none. Two classes of a model may share a name, as ImageNet's cranes do."""
    known = {*names}
    return next((name for name, there in zip(classes, names) if name in known and name != there), None)

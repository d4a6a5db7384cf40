"""A task's examples, from the official GLUE files or the Hub, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from src.cli import UserError
from src.glue.tasks import Task

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class Example:
    texts: tuple[str, ...]  # one or two
    label: float  # a class number, or the value of a regression


def check_sources(tasks: list[Task], glue_dir: str | None) -> None:
    """Raise UserError for files that are not there, before any task is trained."""
    if glue_dir is None:
        return
    if not Path(glue_dir).is_dir():
        raise UserError(f"glue_dir: the folder {glue_dir} does not exist; download GLUE to it, or leave glue_dir out")
    for task in tasks:
        for name in ("train", *task.tsv_validation):
            check_file(task, Path(glue_dir) / task.folder / f"{name}.tsv")


def check_file(task: Task, path: Path) -> None:
    if not path.is_file():
        raise UserError(f"glue_dir: {path} is not there; put {task.title}'s {path.name} at that place, or leave {task.name} out of tasks_to_run")  # fmt: skip


def read_task(task: Task, glue_dir: str | None) -> tuple[list[Example], dict[str, list[Example]]]:
    """Training examples, and validation examples by split. Raises UserError naming the file or dataset it cannot read."""
    if glue_dir is None:
        return read_hub(task, "train"), {split: read_hub(task, split) for split in task.validation}
    check_sources([task], glue_dir)
    folder = Path(glue_dir) / task.folder
    return read_tsv(task, folder / "train.tsv"), {
        split: read_tsv(task, folder / f"{split}.tsv") for split in task.tsv_validation
    }


def read_tsv(task: Task, path: Path) -> list[Example]:
    """Examples of a GLUE TSV file; quotes are literal. Raises UserError naming file and line of a malformed row."""
    check_file(task, path)
    wanted = (*task.tsv_columns, task.tsv_label)
    has_header = all(isinstance(column, str) for column in wanted)
    places: list[int] = [] if has_header else [int(column) for column in wanted]
    width, examples = 0, []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").split("\t")
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: not valid UTF-8; mend the file") from None
            if number == 1:
                width = len(row)
                if has_header:
                    if missing := [str(column) for column in wanted if column not in row]:
                        raise UserError(f"{path}: its header has no {', '.join(missing)} (it has {', '.join(row)})")
                    places = [row.index(str(column)) for column in wanted]
                    continue
            if len(row) != width or max(places) >= width:
                raise UserError(f"{path}, line {number}: {len(row)} columns instead of {max(width, max(places) + 1)}; mend or remove the row")  # fmt: skip
            *texts, label = (row[place] for place in places)
            examples.append(Example(tuple(texts), parse_label(task, label, f"{path}, line {number}")))
    if not examples:
        raise UserError(f"{path} holds no examples")
    return examples


def read_hub(task: Task, split: str) -> list[Example]:
    """Examples of a split of nyu-mll/glue. Raises UserError where the Hub does not answer."""
    from datasets import load_dataset

    try:
        rows = load_dataset(HUB_NAME, task.subset or task.name, split=split)
    except Exception as error:  # whatever the Hub's clients raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read {HUB_NAME} ({task.subset or task.name}) from the Hugging Face Hub: {reason}; set glue_dir to a folder with the GLUE files") from None  # fmt: skip
    return [Example(tuple(row[column] for column in task.columns), float(row["label"])) for row in rows]


def parse_label(task: Task, label: str, place: str) -> float:
    """A label as a number: a class by name or number, or the value of a regression."""
    if label in task.labels:
        return float(task.labels.index(label))
    try:
        value = float(label)
    except ValueError:
        value = float("nan")
    known = not task.labels or value in range(len(task.labels))
    if value != value or not known:
        expected = f"one of {', '.join(task.labels)}" if task.labels else "a number"
        raise UserError(f"{place}: the label {label!r} is not {expected}; mend or remove the row")
    return value


class Batches:
    """Collates tokenized examples: padded to the longest of the batch, rounded up to a multiple of 8."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, regression: bool):
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.label_dtype = torch.float32 if regression else torch.long

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = self.tokenizer(
            *map(list, zip(*(example.texts for example in examples))),
            truncation=True,
            max_length=self.max_seq_len,
            padding="longest",
            pad_to_multiple_of=8 if self.max_seq_len % 8 == 0 else None,
            return_tensors="pt",
        )
        return {**batch, "labels": torch.tensor([example.label for example in examples], dtype=self.label_dtype)}


def loader(examples: list[Example], batches: Batches, batch_size: int, shuffle_seed: int | None = None) -> DataLoader:
    """Batches of a list of examples; in a new order in every epoch if there is a seed. No example is left out."""
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(
        examples,  # type: ignore[arg-type]  # a list is a map-style dataset
        batch_size=batch_size,
        shuffle=shuffle_seed is not None,
        generator=generator,
        collate_fn=batches,
        pin_memory=torch.cuda.is_available(),
    )

"""What the tests of fine-tuning share: rows of GLUE's official files, and small folders of them."""

import random
from pathlib import Path

import yaml
from conftest import ROOT, sentences

from src.glue.examples import Example

PAIR_TEST = ["index", "sentence1", "sentence2"]
MNLI_TRAIN = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label"
).split()
MNLI_DEV = [*MNLI_TRAIN[:-1], "label2", "label3", "label4", "label5", "gold_label"]
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score".split()
MRPC = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
# Task → header, a row, and what should come of it.
OFFICIAL = {
    "cola": (None, ["gj04", "0", "*", "They \"drank' the pub."], Example(("They \"drank' the pub.",), 0)),
    "sst2": (["sentence", "label"], ['"a charming journey ', "1"], Example(('"a charming journey ',), 1)),
    "mrpc": (
        MRPC,
        ["1", "7", "8", 'He said "no .', 'No " , he said .'],
        Example(('He said "no .', 'No " , he said .'), 1),
    ),
    "stsb": (
        STSB,
        ["0", "main", "MSRvid", "2012", "1", "none", "none", "A man.", "A “man”.", "3.800"],
        Example(("A man.", "A “man”."), 3.8),
    ),
    "qqp": (
        "id qid1 qid2 question1 question2 is_duplicate".split(),
        ["1", "2", "3", "Why?", "Why not?", "0"],
        Example(("Why?", "Why not?"), 0),
    ),
    "qnli": (
        ["index", "question", "sentence", "label"],
        ["0", "Who?", "He.", "not_entailment"],
        Example(("Who?", "He."), 1),
    ),
    "rte": (
        ["index", "sentence1", "sentence2", "label"],
        ["0", "It rains.", "It is wet.", "entailment"],
        Example(("It rains.", "It is wet."), 0),
    ),
    "mnli": (
        MNLI_TRAIN,
        [*("0 1n 1n fiction ( ( ) ( ( )".split()[:6]), "p", "p", "Premise.", "Hypothesis.", "neutral", "contradiction"],
        Example(("Premise.", "Hypothesis."), 2),
    ),
}
# Task → header of the test set, and a row.
OFFICIAL_TEST = {
    "cola": (["index", "sentence"], ["0", "They \"drank' the pub."]),
    "sst2": (["index", "sentence"], ["0", '"a charming journey ']),
    "mrpc": (["index", *MRPC[1:]], ["0", "7", "8", 'He said "no .', 'No " , he said .']),
    "stsb": (STSB[:-1], OFFICIAL["stsb"][1][:-1]),
    "qqp": (["id", "question1", "question2"], ["0", "Why?", "Why not?"]),
    "qnli": (["index", "question", "sentence"], ["0", "Who?", "He."]),
    "rte": (PAIR_TEST, ["0", "It rains.", "It is wet."]),
    "mnli": (MNLI_TRAIN[:-2], OFFICIAL["mnli"][1][:-2]),
}


def write_tsv(path: Path, header: list[str] | None, rows: list[list[str]], bom: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in ([header] if header else []) + rows]
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + "".join(f"{line}\n" for line in lines).encode())
    return path


def write_glue(folder: Path, train: int = 24, dev: int = 10) -> Path:
    """SST-2, STS-B, RTE and MNLI of a few rows, in the official layout."""
    draw = random.Random(5)
    for file, count in (("train", train), ("dev", dev), ("test", 5)):
        texts = sentences(count, seed=count)
        test = file == "test"
        sst2 = [[str(i), text] if test else [text, str(i % 2)] for i, text in enumerate(texts)]
        write_tsv(folder / "SST-2" / f"{file}.tsv", OFFICIAL_TEST["sst2"][0] if test else OFFICIAL["sst2"][0], sst2)
        stsb = [[*OFFICIAL["stsb"][1][:7], text, draw.choice(texts), f"{draw.uniform(0, 5):.3f}"] for text in texts]
        write_tsv(
            folder / "STS-B" / f"{file}.tsv", STSB[:-1] if test else STSB, [row[: 9 if test else 10] for row in stsb]
        )
        rte = [
            [str(i), text, draw.choice(texts), ("entailment", "not_entailment")[i % 2]] for i, text in enumerate(texts)
        ]
        write_tsv(
            folder / "RTE" / f"{file}.tsv",
            OFFICIAL["rte"][0][: 3 if test else 4],
            [row[: 3 if test else 4] for row in rte],
        )
        labels = ("entailment", "neutral", "contradiction")
        mnli = [
            [*OFFICIAL["mnli"][1][:8], text, draw.choice(texts), labels[i % 3], labels[i % 3]]
            for i, text in enumerate(texts)
        ]
        for suffix in ("",) if file == "train" else ("_matched", "_mismatched"):
            width = 10 if test else 12
            write_tsv(folder / "MNLI" / f"{file}{suffix}.tsv", MNLI_TRAIN[:width], [row[:width] for row in mnli])
    return folder


def write_yaml(path: Path, **settings) -> Path:
    """A config of small jobs on the CPU."""
    shared = {
        "inherit": str(ROOT / "yamls" / "finetune-glue" / "recipe.yaml"),
        "base_run_name": "tiny-glue",
        "max_seq_len": 64,
        "device": "cpu",
        "save_folder": str(path.parent / "run"),
    }
    path.write_text(yaml.safe_dump({**shared, **settings}))
    return path

"""Test set predictions as files for the GLUE server: NAME.tsv with `index` and `prediction`."""

import json
from pathlib import Path
from typing import Any

from src.glue.examples import DIAGNOSTIC
from src.glue.tasks import GLUE
from src.jobs import predictions

FILES = {"cola": ("CoLA",), "sst2": ("SST-2",), "mrpc": ("MRPC",), "stsb": ("STS-B",),
         "mnli": ("MNLI-m", "MNLI-mm", DIAGNOSTIC), "qnli": ("QNLI",), "rte": ("RTE",), "qqp": ("QQP",)}  # fmt: skip
NOT_OURS = "WNLI"  # the server requires it too
NUMBERED = ("cola", "sst2", "mrpc", "qqp")  # tasks submitted as class indices; the others as class names


def write(rows: list[dict[str, Any]], run: Path) -> str:
    """Write run/submission/*.tsv, and return a line that names the folder and the files that the server also needs.

    Each task uses the predictions of the seed with the highest validation score.
    """
    folder = run / "submission"
    folder.mkdir(exist_ok=True)
    written = set()
    for row in rows:
        best = max(row["seeds"], key=row["seeds"].get)
        job = run / "jobs" / row["folders"][best]
        result = json.loads((job / "result.json").read_text())
        files = FILES.get(row["task"], tuple(f"{row['task']}-{split}" for split in result["test_splits"]))
        for file, split in zip(files, result["test_splits"]):
            shown = [show(row["task"], line["prediction"], result["labels"]) for line in predictions.read(job, split)]
            numbered = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(shown))
            name = DIAGNOSTIC if split == DIAGNOSTIC else file
            (folder / f"{name}.tsv").write_text(f"index\tprediction\n{numbered}", encoding="utf-8")
            written.add(name)
    wanted = [*(file for task in GLUE for file in FILES[task]), NOT_OURS]
    missing = [f"{name}.tsv" for name in wanted if name not in written] if written & set(wanted) else []
    earlier = sorted(path.name for path in folder.glob("*.tsv") if path.stem not in {*written, NOT_OURS})
    needed = f"; the server also needs {', '.join(missing)}" if missing else ""
    return f"test sets    {folder}{needed}" + (f"; from earlier runs: {', '.join(earlier)}" if earlier else "")


def show(task: str, prediction: str | float, labels: list[str]) -> str:
    if task == "stsb":
        return f"{min(5.0, max(0.0, prediction)):.3f}"  # the range of STS-B's labels
    if task in NUMBERED:
        return str(labels.index(prediction))
    # A tab or line break in a class name would start another cell or row.
    return str(prediction).translate({ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"})

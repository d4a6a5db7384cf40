"""`main.py context`: how well masked language models predict the same tokens from more and from less context."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src import plots
from src.cli import check_alone, log, progress
from src.config import SEED, Rule, check_value
from src.data.readers import find_files
from src.errors import UserError
from src.files import check_writable, distinct, read_result, sha256, write_atomically, write_json
from src.jobs.report import writing
from src.tables import markdown

if TYPE_CHECKING:
    from torch import Tensor

    from src.lion import LionForMaskedLM
    from src.mlm.pieces import Reading

RULES = {
    "rows": Rule(at_least=2), "batch_tokens": Rule(at_least=1), "resamples": Rule(at_least=1), "seed": Rule(**SEED),
    "mlm_probability": Rule(above=0, below=1),
}  # fmt: skip
NOTE = (
    "Documents are joined into {rows:,} rows of {longest:,} tokens; {masked:,} tokens are masked, the same in all "
    "columns. A column's number is the length of the pieces that rows are cut into and that are read one by one. The "
    "last column of the first table is the accuracy in the longest pieces minus that in the shortest, in points, with "
    "95% confidence interval and two-sided p-value, by a paired bootstrap of {resamples:,} resamples over the rows."
)
EXAMPLE = "python main.py context runs/lion-s-base-8k/latest-rank0.pt --data_files 'texts/*.jsonl' --out context"


def context(argv: list[str]) -> None:
    """Run the command. Raises UserError, RunFailed."""
    check_alone("main.py context")
    options = parse(argv)
    check(options)
    check_writable("--out", options.out)
    titles, files = distinct(options.models, "MODEL"), find_files(options.data_files)
    from src.lion.cpu import flush_denormals
    from src.mlm import pieces
    from src.training.trainer import resolve_device, silence_libraries

    silence_libraries()
    flush_denormals()
    device = "cuda" if resolve_device(options.device) == "gpu" else "cpu"
    reading = pieces.Reading(device, options.precision == "bf16", options.batch_tokens)
    longest = options.lengths[-1]
    opened, tokenizer = pieces.open_models(options.models, options.tokenizer)
    models = dict(zip(titles, opened))
    readable = {title: lengths_of(title, model, options.lengths) for title, model in models.items()}
    rows = pieces.read_rows(files, options.text_column, tokenizer, longest, options.rows)
    ids, labels = pieces.mask_rows(rows, tokenizer, options.mlm_probability, options.seed)
    masked = (labels >= 0).sum(1).tolist()
    log.info(f"{len(rows):,} rows of {longest:,} tokens, {sum(masked):,} of them masked, on {device}")
    results, of_rows = {}, sha256([ids.numpy().data, labels.numpy().data])
    for title, model in models.items():
        of = {"model": pieces.digest(model), "rows": of_rows, "lengths": readable[title]}
        of |= {"precision": options.precision, "resamples": options.resamples}
        stored = options.out / "models" / (re.sub(r"[^\w.-]+", "-", title) + ".json")
        if (found := read_result(stored, of)) is not None:
            log.info(f"{title}: read from {stored}")
            found["lengths"] = {int(length): result for length, result in found["lengths"].items()}
        else:
            found = evaluate(title, model, readable[title], ids, labels, reading, options.resamples)
            with writing(options.out):
                stored.parent.mkdir(parents=True, exist_ok=True)
                write_json(stored, {"of": of, **found})
        results[title] = found
    settings = {name: getattr(options, name) for name in ("lengths", "mlm_probability", "seed", "precision")}
    report = {"data_files": [*map(str, files)], **settings, "masked": masked, "results": results}
    shown = text(report, options.resamples)
    print(f"\n{shown}")
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "report.md", f"# Masked accuracy and length of context\n\n{shown}\n")
        write_json(options.out / "report.json", report)
        draw(results, options.out / "context.png")
    print(f"\nreport   {options.out / 'report.md'}, report.json\npicture  {options.out / 'context.png'}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "main.py context",
        description="Measure whether masked language models use distant context: print accuracy and loss for the "
        "same masked tokens when the text is cut into pieces of several lengths.",
        epilog=f"Example: {EXAMPLE}",
    )
    add = parser.add_argument
    words = (
        "checkpoint of main.py, Hub folder or name, Hugging Face BERT, or ModernBERT with global attention alone; all "
        "with the same tokenizer"
    )
    add("models", metavar="MODEL", nargs="+", help=words)
    add("--data_files", required=True, nargs="+", metavar="GLOB", help="text, in the formats of convert_dataset")
    add("--text_column", default="text", metavar="NAME", help="column or key with the text (default: text)")
    add("--tokenizer", metavar="NAME", help="folder or Hub name (default: the models' own)")
    words = "tokens of a piece; each divides the longest, the length of a row (default: 128 512 2048 8192)"
    add("--lengths", type=int, nargs="+", metavar="TOKENS", default=(128, 512, 2048, 8192), help=words)
    add("--rows", type=int, default=32, help="rows to read, if there is enough text (default: 32)")
    add("--mlm_probability", type=float, default=0.15, help="masking rate (default: 0.15)")
    add("--seed", type=int, default=17, help="seed of the masks (default: 17)")
    add("--batch_tokens", type=int, default=16384, help="tokens per batch (default: 16384)")
    add("--device", choices=["gpu", "cpu"], help="default: a GPU if there is one")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    add("--resamples", type=int, default=1000, help="bootstrap resamples (default: 1000)")
    add("--out", type=Path, required=True, help="folder for report.md, report.json and context.png")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Raise UserError for a value out of bounds, and sort the lengths."""
    for name, rule in RULES.items():
        check_value(f"--{name}", value := getattr(options, name), type(value), rule)
    options.lengths = sorted({*options.lengths})
    for length in options.lengths:
        check_value("--lengths", length, int, Rule(at_least=8))
        if (longest := options.lengths[-1]) % length:
            raise UserError(f"--lengths: {length} does not divide the longest, {longest}; give divisors of the longest")


def lengths_of(title: str, model: "LionForMaskedLM", lengths: list[int]) -> list[int]:
    """Return the lengths that a model can read, and report the others. Raises UserError if it can read none."""
    from src.mlm.pieces import longest_text

    limit = longest_text(model) or lengths[-1]
    if limit < lengths[0]:
        raise UserError(
            f"--lengths: {title} has {limit} position embeddings; add a length up to that, or omit the model"
        )
    if limit < lengths[-1]:
        log.info(f"{title} has {limit:,} position embeddings, and does not read longer pieces")
    return [length for length in lengths if length <= limit]


def evaluate(
    title: str,
    model: "LionForMaskedLM",
    lengths: list[int],
    ids: "Tensor",
    labels: "Tensor",
    reading: "Reading",
    resamples: int,
) -> dict[str, Any]:
    """Return a model's accuracy and loss at each length, also of each row, and the gain from the shortest to the
    longest; None if there is only one."""
    from src.jobs.comparison import paired
    from src.mlm.pieces import predict

    masked, found, gain = int((labels >= 0).sum()), {}, None
    model.to(reading.device)
    with progress(total=len(lengths) * ids.numel(), desc=title, unit="token") as bar:
        for length in lengths:
            right, loss = predict(model, ids, labels, length, reading, bar)
            found[length] = {
                "accuracy": float(right.sum()) / masked, "loss": float(loss.sum()) / masked,
                "by_row": {"correct": right.int().tolist(), "loss": loss.tolist()},
            }  # fmt: skip
    model.to("cpu")  # a GPU's memory is the next one's
    if len(lengths) > 1:
        # Correct predictions relative to a mean row's masked tokens: their mean over rows is the accuracy. A row's own
        # number would give the tokens of rows with few masked ones more weight.
        per_row = masked / len(ids)
        ends = ([n / per_row for n in found[end]["by_row"]["correct"]] for end in (lengths[0], lengths[-1]))
        gain = paired(*ends, resamples)._asdict()
    return {"lengths": found, "gain": gain}


def text(report: dict[str, Any], resamples: int) -> str:
    """Return a table of accuracies, one of losses, and what they are."""
    from src.jobs.comparison import Difference

    lengths, results = report["lengths"], report["results"]
    header = [f"{length:,}" for length in lengths]
    accuracy = [["masked accuracy", *header, "longest − shortest"]]
    loss = [["nats per masked token", *header]]
    for title, result in results.items():
        found = [result["lengths"].get(length) for length in lengths]
        gain = str(Difference(**result["gain"])) if result["gain"] else "-"
        accuracy.append([title, *(f"{one['accuracy']:.2%}" if one else "-" for one in found), gain])
        loss.append([title, *(f"{one['loss']:.4f}" if one else "-" for one in found)])
    masked = report["masked"]
    note = NOTE.format(rows=len(masked), longest=lengths[-1], masked=sum(masked), resamples=resamples)
    limited = any(len(result["lengths"]) < len(lengths) for result in results.values())
    note += " A dash: more tokens than the model has position embeddings." if limited else ""
    return "\n\n".join([markdown(accuracy), markdown(loss), note])


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of each model against the length of the pieces."""
    figure, axes = plots.subplots()
    axis = axes[0, 0]
    for (title, result), shade in zip(results.items(), plots.colors(results)):
        points = [(length, 100 * one["accuracy"]) for length, one in result["lengths"].items()]
        axis.plot(*zip(*points), "o-", color=shade, label=title)
    plots.label_axes(axis, "masked accuracy", "tokens of context", "%")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    plots.save(figure, path)

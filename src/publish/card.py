"""The README.md of a Hub folder, from facts in the checkpoint and beside it. Unknown facts are omitted."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from src import lion
from src.checkpoints.reading import Checkpoint
from src.publish.run_facts import RunFacts, Source, at, is_glue, missing_seeds, read_run, read_sources
from src.publish.spec import EXPORTS
from src.tables import markdown

TEMPLATE = Path(__file__).with_name("card_template.md")
PAPER = "[arXiv:2502.16249](https://arxiv.org/abs/2502.16249)"
VARIANTS = {
    "lion-lit": "LION-LIT, linear attention without decay, with learned position embeddings",
    "lion-d": "LION-D, linear attention with one learned decay per head",
    "lion-s": "LION-S, linear attention with a decay computed from each token",
    "softmax": "BERT's softmax attention, with learned position embeddings",
}
TEXT, PAIR = '"A text."', '{"text": "One text.", "text_pair": "Another."}'  # EXAMPLE in a spec's lines of use

Rows = list[tuple[str, Any]]


def model_card(checkpoint: Checkpoint, name: str, scores: dict[str, Any] | None = None) -> str:
    """Return the card of a checkpoint exported to a folder called `name`. `scores` is a report.json of glue.py."""
    run = read_run(checkpoint)
    config = lion.LionConfig(**checkpoint.config)
    title = " ".join((checkpoint.run_name or name).split())
    card = ModelCard.from_template(
        _metadata(checkpoint, run, title, scores),
        template_path=str(TEMPLATE),
        title=title,
        description=_description(checkpoint, run, config.mixer),
        usage=_usage(checkpoint, run, name),
        model=_sizes(checkpoint, config),
        training=_training(checkpoint, run),
        evaluation=_evaluation(checkpoint, run, scores),
        published=checkpoint.published,
    )
    return f"{card.content.rstrip()}\n"


def _metadata(checkpoint: Checkpoint, run: RunFacts, title: str, scores: dict[str, Any] | None) -> ModelCardData:
    spec = EXPORTS[checkpoint.class_name]
    results = [
        _task_result(row, " and ".join(row["metrics"]), row["mean"], None) for row in (scores or {"tasks": []})["tasks"]
    ]
    for split, values in (run.result or {}).get("scores", {}).items():
        results += [_task_result(run.result, metric, value, split) for metric, value in values.items()]
    sources = read_sources(run.config, "eval_loader")
    if run.evaluation and sources:
        name = _names(sources)
        dataset = {"dataset_type": sources[0].hub_id or name, "dataset_config": sources[0].subset}
        dataset |= {"dataset_name": name, "dataset_split": at(run.config, "eval_loader.dataset.split")}
        results += [
            EvalResult(
                spec.pipeline_tag, metric_type=metric.hub_type, metric_name=metric.label, metric_value=value, **dataset
            )
            for metric in spec.metrics
            if metric.hub_type and (value := run.evaluation["eval"].get(metric.key)) is not None
        ]
    datasets = [source.hub_id for source in read_sources(run.config, "train_loader") if source.hub_id]
    if run.result and is_glue(run.result):
        datasets.append("nyu-mll/glue")
    return ModelCardData(
        model_name=title if results else None,
        eval_results=results or None,
        license=None if checkpoint.published else "apache-2.0",
        library_name="transformers",
        pipeline_tag=spec.pipeline_tag if checkpoint.tokenizer else None,
        tags=["lion", "linear-attention", checkpoint.config.get("mixer", "lion-s")],
        datasets=datasets or None,
    )


def _task_result(row: dict[str, Any], metric: str, value: float, split: str | None) -> EvalResult:
    task, title = row["task"], row["title"]
    glue = {"dataset_type": "nyu-mll/glue", "dataset_config": task, "dataset_name": f"GLUE {title}"}
    dataset = glue if is_glue(row) else {"dataset_type": task, "dataset_name": title}
    return EvalResult("text-classification", dataset_split=split, metric_type=metric, metric_value=value, **dataset)


def _description(checkpoint: Checkpoint, run: RunFacts, mixer: str) -> str:
    variant = VARIANTS.get(mixer, mixer)
    text = f": BERT with {variant} ({PAPER})"
    if mixer == "softmax":
        text = f" with {variant}: the baseline of LION ({PAPER})"
    if run.result:
        text += f", fine-tuned on {run.result['title']}"
    elif checkpoint.class_name == "LionForMaskedLM":
        text += ", pretrained as a masked language model"
    return f"{text}. Converted from the paper's authors' {checkpoint.published}" if checkpoint.published else text


def _usage(checkpoint: Checkpoint, run: RunFacts, name: str) -> str:
    spec = EXPORTS[checkpoint.class_name]
    if checkpoint.tokenizer and spec.usage:
        columns = at(run.result or {}, "settings.task.columns") or ()
        return spec.usage.replace("MODEL", name).replace("EXAMPLE", PAIR if len(columns) == 2 else TEXT)
    auto = spec.auto_class
    return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{name}", trust_remote_code=True)'


def _sizes(checkpoint: Checkpoint, config: "lion.LionConfig") -> Rows:
    # The decoder's weights are the word embeddings and count once.
    parameters = sum(t.numel() for name, t in checkpoint.weights.items() if name != "head.decoder.weight")
    rows = [
        ("mixer", config.mixer),
        ("parameters", f"{parameters:,}"),
        ("layers", config.num_hidden_layers),
        ("hidden size", f"{config.hidden_size:,}"),
        ("heads", config.num_attention_heads),
        ("MLP size", f"{config.intermediate_size:,}"),
        ("vocabulary size", f"{config.vocab_size:,}"),
    ]
    if config.has_positions:
        rows.append(("maximum sequence length", f"{config.max_position_embeddings:,} tokens"))
    classifies = checkpoint.class_name in ("LionForSequenceClassification", "LionForTokenClassification")
    if classifies and config.num_labels > 1:  # a regression has one, without a meaning
        rows.append(("labels", ", ".join(map(str, config.id2label.values()))))
    return rows


def _training(checkpoint: Checkpoint, run: RunFacts) -> Rows:
    config, timestamp = run.config, checkpoint.timestamp
    counted = {"steps": "batch", "samples": "sample", "tokens": "token"}
    rows = [(name, f"{timestamp[key]:,}") for name, key in counted.items() if timestamp.get(key)]
    if run.result:
        rows += [("task", run.result["title"]), ("seed", run.result["seed"])]
        rows += [("training examples", f"{run.result['train_examples']:,}")] if "train_examples" in run.result else []
        task = at(run.result, "settings.task") or {}
        known = ("epochs", "batch_size", "optimizer", "lr", "weight_decay")
        return rows + [(key.replace("_", " "), task[key]) for key in known if key in task]
    facts = {
        "data": _names(read_sources(config, "train_loader")),
        "split": at(config, "train_loader.dataset.split"),
        "tokenizer": _tokenizer(checkpoint, at(config, "tokenizer_name")),
        "maximum sequence length in training": at(config, "max_seq_len"),
        "masking rate": at(config, "mlm_probability"),
        "batch size": at(config, "global_train_batch_size"),
        "optimizer": _arguments(at(config, "optimizer")),
        "schedule": _arguments(at(config, "scheduler")),
        "precision": at(config, "precision"),
        "seed": at(config, "seed"),
    }
    return rows + [(name, value) for name, value in facts.items() if value is not None]


def _names(sources: list[Source]) -> str | None:
    return ", ".join(dict.fromkeys(source.name for source in sources)) or None


def _tokenizer(checkpoint: Checkpoint, name: str | None) -> str | None:
    """Return a tokenizer's name on the Hub, or what a local one is: its path is nobody's business."""
    if name is None or not (name.startswith((".", "/", "~")) or Path(name).exists()):
        return name
    if (tokenizer := checkpoint.load_tokenizer()) is None:
        return None
    config = json.loads(checkpoint.tokenizer_files().get("tokenizer_config.json", b"{}"))
    case = {True: ", lower case", False: ", case-sensitive"}.get(config.get("do_lower_case"), "")
    return f"{config.get('tokenizer_class', type(tokenizer).__name__)} with {len(tokenizer):,} tokens{case}"


def _arguments(section: dict[str, Any] | None) -> str | None:
    if not section:
        return None
    arguments = ", ".join(f"{key} {value}" for key, value in section.items() if key != "name")
    return f"{section['name']} ({arguments})" if arguments else section["name"]


def _evaluation(checkpoint: Checkpoint, run: RunFacts, scores: dict[str, Any] | None) -> list[str]:
    parts = []
    if run.evaluation:
        rate = at(run.config, "eval_loader.dataset.mlm_probability")
        masked = "" if rate is None else f", with {rate:.0%} of the tokens masked"
        values = run.evaluation["eval"]
        metrics = [metric for metric in EXPORTS[checkpoint.class_name].metrics if metric.key in values]
        words = ", ".join(f"{metric.label} {values[metric.key]:{metric.form}}" for metric in metrics)
        parts.append(f"At step {run.evaluation['step']:,}{masked}: {words}.")
    if run.result:
        lines = [
            [split, metric, f"{100 * value:.2f}"]
            for split, values in run.result.get("scores", {}).items()
            for metric, value in values.items()
        ]
        parts.append(markdown([["split", "metric", "score"], *lines]))
    if scores:
        rows = scores["tasks"]
        lines = [
            [
                row["title"],
                " and ".join(row["metrics"]),
                f"{100 * row['mean']:.2f}",
                missing_seeds(row) or len(row["seeds"]),
            ]
            for row in rows
        ]
        if scores.get("glue") is not None:
            lacking = ", ".join(
                f"{row['title']}: {missing_seeds(row)}" for row in rows if is_glue(row) and missing_seeds(row)
            )
            lines.append(["GLUE average", "", f"{100 * scores['glue']:.2f}{f' ({lacking})' if lacking else ''}", ""])
        table = markdown([["task", "metric", "score", "seeds"], *[list(map(str, line)) for line in lines]])
        parts.append(f"Fine-tuned from this checkpoint, the mean over seeds:\n\n{table}")
    return parts

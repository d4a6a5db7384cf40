"""The README.md of a Hub folder, from the checkpoint and the files next to it. Unknown facts are omitted."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from src import lion
from src.checkpoints.reading import Checkpoint
from src.publish.run_facts import RunFacts, at, is_glue, missing_seeds, read_run, read_source
from src.publish.spec import EXPORTS
from src.tables import markdown

TEMPLATE = Path(__file__).with_name("card_template.md")
VARIANTS = {
    "lion-lit": "LION-LIT, linear attention without decay, with learned position embeddings",
    "lion-d": "LION-D, linear attention with one learned decay per head",
    "lion-s": "LION-S, linear attention with a decay computed from each token",
    "softmax": "BERT's softmax attention, with learned position embeddings",
}
TEXT, PAIR = '"A text."', '{"text": "One text.", "text_pair": "Another."}'  # EXAMPLE in a spec's usage lines

Facts = dict[str, Any]


def model_card(checkpoint: Checkpoint, name: str, scores: dict[str, Any] | None = None) -> str:
    """Return the card of a checkpoint exported to a folder called `name`. `scores` is a report.json of glue.py."""
    run = read_run(checkpoint)
    title = " ".join((checkpoint.run_name or name).split())
    sections = {"model": _sizes(checkpoint), "training": _job(run) if run.result else _training(checkpoint, run)}
    counted = {"steps": "batch", "samples": "sample", "tokens": "token"}
    counts = {name: checkpoint.timestamp.get(unit) for name, unit in counted.items()}
    sections["training"] = {name: f"{count:,}" for name, count in counts.items() if count} | sections["training"]
    card = ModelCard.from_template(
        _metadata(checkpoint, run, title, scores),
        template_path=str(TEMPLATE),
        title=title,
        mixer=lion.LionConfig(**checkpoint.config).mixer,
        variants=VARIANTS,
        task=run.result["title"] if run.result else None,
        masked_lm=checkpoint.class_name == "LionForMaskedLM",
        published=checkpoint.published,
        usage=_usage(checkpoint, run, name),
        evaluation=_evaluation(checkpoint, run, scores),
        **sections,
    )
    return f"{card.content.rstrip()}\n"


def _metadata(checkpoint: Checkpoint, run: RunFacts, title: str, scores: dict[str, Any] | None) -> ModelCardData:
    spec, result = EXPORTS[checkpoint.class_name], run.result or {}
    rows = scores["tasks"] if scores else []
    results = [_task_result(row, " and ".join(row["metrics"]), row["mean"], None) for row in rows]
    for split, values in result.get("scores", {}).items():
        results += [_task_result(result, metric, value, split) for metric, value in values.items()]
    if run.evaluation and (source := read_source(run.config, "eval_loader")):
        facts = {"dataset_type": source.hub_id or source.name, "dataset_config": source.subset}
        facts |= {"dataset_name": source.name, "dataset_split": at(run.config, "eval_loader.dataset.split")}
        for metric in spec.metrics:
            if metric.hub_type and (value := run.evaluation["eval"].get(metric.key)) is not None:
                named = {"metric_type": metric.hub_type, "metric_value": value, "metric_name": metric.label}
                results.append(EvalResult(spec.pipeline_tag, **facts, **named))
    source = read_source(run.config, "train_loader")
    dataset = "nyu-mll/glue" if result and is_glue(result) else source and source.hub_id
    return ModelCardData(
        model_name=title if results else None,
        eval_results=results or None,
        license=None if checkpoint.published else "apache-2.0",
        library_name="transformers",
        pipeline_tag=spec.pipeline_tag if checkpoint.tokenizer else None,
        tags=["lion", "linear-attention", checkpoint.config.get("mixer", "lion-s")],
        datasets=[dataset] if dataset else None,
    )


def _task_result(row: dict[str, Any], metric: str, value: float, split: str | None) -> EvalResult:
    task, title = row["task"], row["title"]
    glue = {"dataset_type": "nyu-mll/glue", "dataset_config": task, "dataset_name": f"GLUE {title}"}
    dataset = glue if is_glue(row) else {"dataset_type": task, "dataset_name": title}
    return EvalResult("text-classification", dataset_split=split, metric_type=metric, metric_value=value, **dataset)


def _usage(checkpoint: Checkpoint, run: RunFacts, name: str) -> str:
    spec = EXPORTS[checkpoint.class_name]
    if checkpoint.tokenizer and spec.usage:
        columns = at(run.result or {}, "settings.task.columns") or ()
        return spec.usage.replace("MODEL", name).replace("EXAMPLE", PAIR if len(columns) == 2 else TEXT)
    auto = spec.auto_class
    return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{name}", trust_remote_code=True)'


def _sizes(checkpoint: Checkpoint) -> Facts:
    config = lion.LionConfig(**checkpoint.config)
    # The decoder's weights are the word embeddings and count once.
    parameters = sum(t.numel() for name, t in checkpoint.weights.items() if name != "head.decoder.weight")
    facts = {
        "mixer": config.mixer,
        "parameters": f"{parameters:,}",
        "layers": config.num_hidden_layers,
        "hidden size": f"{config.hidden_size:,}",
        "heads": config.num_attention_heads,
        "MLP size": f"{config.intermediate_size:,}",
        "vocabulary size": f"{config.vocab_size:,}",
    }
    if config.has_positions:
        facts["maximum sequence length"] = f"{config.max_position_embeddings:,} tokens"
    classifies = checkpoint.class_name in ("LionForSequenceClassification", "LionForTokenClassification")
    if classifies and config.num_labels > 1:  # a regression has one label, without meaning
        facts["labels"] = ", ".join(map(str, config.id2label.values()))
    return facts


def _job(run: RunFacts) -> Facts:
    facts = {"task": run.result["title"], "seed": run.result["seed"]}
    if "train_examples" in run.result:
        facts["training examples"] = f"{run.result['train_examples']:,}"
    task, known = at(run.result, "settings.task") or {}, ("epochs", "batch_size", "optimizer", "lr", "weight_decay")
    return facts | {key.replace("_", " "): task[key] for key in known if key in task}


def _training(checkpoint: Checkpoint, run: RunFacts) -> Facts:
    config, source = run.config, read_source(run.config, "train_loader")
    facts = {
        "data": source and source.name,
        "split": at(config, "train_loader.dataset.split"),
        "tokenizer": _tokenizer(checkpoint, config.get("tokenizer_name")),
        "maximum sequence length in training": config.get("max_seq_len"),
        "masking rate": config.get("mlm_probability"),
        "batch size": config.get("global_train_batch_size"),
        "optimizer": _arguments(config.get("optimizer")),
        "schedule": _arguments(config.get("scheduler")),
        "precision": config.get("precision"),
        "seed": config.get("seed"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _tokenizer(checkpoint: Checkpoint, name: str | None) -> str | None:
    """Return a tokenizer's name on the Hub, or a description of a local one, since its path is private."""
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
        rate, values = at(run.config, "eval_loader.dataset.mlm_probability"), run.evaluation["eval"]
        masked = "" if rate is None else f", with {rate:.0%} of the tokens masked"
        metrics = [metric for metric in EXPORTS[checkpoint.class_name].metrics if metric.key in values]
        words = ", ".join(f"{metric.label} {values[metric.key]:{metric.form}}" for metric in metrics)
        parts.append(f"At step {run.evaluation['step']:,}{masked}: {words}.")
    if run.result:
        lines = [["split", "metric", "score"]]
        for split, values in run.result.get("scores", {}).items():
            lines += [[split, metric, f"{100 * value:.2f}"] for metric, value in values.items()]
        parts.append(markdown(lines))
    if scores:
        lines, rows = [["task", "metric", "score", "seeds"]], scores["tasks"]
        for row in rows:
            seeds = missing_seeds(row) or str(len(row["seeds"]))
            lines.append([row["title"], " and ".join(row["metrics"]), f"{100 * row['mean']:.2f}", seeds])
        if scores.get("glue") is not None:
            missing = [f"{row['title']}: {missing_seeds(row)}" for row in rows if is_glue(row) and missing_seeds(row)]
            words = f" ({', '.join(missing)})" if missing else ""
            lines.append(["GLUE average", "", f"{100 * scores['glue']:.2f}{words}", ""])
        parts.append(f"Fine-tuned from this checkpoint, the mean over seeds:\n\n{markdown(lines)}")
    return parts

"""The README.md of a Hub folder, from facts in the checkpoint and in its run's folder. What is not known is left out."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from src import lion
from src.checkpoints.reading import Checkpoint
from src.errors import UserError
from src.jobs import report
from src.publish.folder import PROOF, auto_class
from src.tables import markdown
from src.training.metrics import METRICS_FILE, evaluations

PAPER = "[arXiv:2502.16249](https://arxiv.org/abs/2502.16249)"
VARIANTS = {
    "lion-lit": "LION-LIT, linear attention without decay, with learned positions",
    "lion-d": "LION-D, linear attention with one learned decay a head",
    "lion-s": "LION-S, linear attention with a decay learned from each token",
    "softmax": "BERT's softmax attention, with learned positions",
}
TASKS = {
    "LionForMaskedLM": "fill-mask",
    "LionForSequenceClassification": "text-classification",
    "LionForTokenClassification": "token-classification",
    "LionForQuestionAnswering": "question-answering",
}
CITATION = """@inproceedings{afzal2025linear,
  title     = {Linear Attention for Efficient Bidirectional Sequence Modeling},
  author    = {Afzal, Arshia and others},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2025}
}"""

Table = list[list[str]]


@dataclass
class Run:
    """What a run left beside its checkpoint; empty where it is not there, or is another run's."""

    config: dict[str, Any] = field(default_factory=dict)  # config.yaml of main.py
    evaluation: dict[str, Any] | None = None  # the last one up to the checkpoint, as `evaluations` gives it
    result: dict[str, Any] | None = None  # result.json of a job of glue.py


def read_run(checkpoint: Checkpoint) -> Run:
    """The facts beside a checkpoint, if they are of the same run."""
    folder, name = checkpoint.path.parent, checkpoint.run_name
    if name is None or checkpoint.published:
        return Run()
    run = Run()
    config = _read(folder / "config.yaml")
    if config.get("run_name") == name:
        run.config = config
        if (folder / METRICS_FILE).is_file():
            step = checkpoint.timestamp.get("batch", 0)
            run.evaluation = next((e for e in reversed(evaluations(folder)) if e["step"] <= step), None)
    result = _read(folder / "result.json")
    if "task" in result and name.endswith(f"-{result.get('folder')}"):
        run.result = result
    return run


def read_scores(path: Path) -> dict[str, Any]:
    """The report of glue.py, from its report.json or the folder of it. Raises UserError where it is none."""
    file = path / "report.json" if path.is_dir() else path
    scores = _read(file)
    if not scores.get("tasks"):
        raise UserError(f"--glue {path}: {file} is no report of glue.py; name a report.json, or the folder of one")
    return scores


def model_card(checkpoint: Checkpoint, name: str, scores: dict[str, Any] | None = None) -> str:
    """The card of a checkpoint that is exported to a folder called `name`; `scores` is a report of glue.py."""
    run = read_run(checkpoint)
    title = " ".join((checkpoint.run_name or name).split())
    parts = [
        f"---\n{_metadata(checkpoint, run, title, scores)}\n---",
        f"# {title}",
        _introduction(checkpoint, run),
        f"## Use\n\n```python\n{_usage(checkpoint, run, name)}\n```",
        f"## Model\n\n{_rows(_sizes(checkpoint))}",
        *([f"## Training\n\n{_rows(facts)}"] if (facts := _training(checkpoint, run)) else []),
        *([f"## Evaluation\n\n{results}"] if (results := _evaluation(run, scores)) else []),
        f"## Licence and citation\n\n{_licence(checkpoint)}\n\n```bibtex\n{CITATION}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(checkpoint: Checkpoint, run: Run, title: str, scores: dict[str, Any] | None) -> str:
    results = [*_glue_results(scores or {"tasks": []}), *_job_results(run.result)]
    data, split = _data(run.config), _at(run.config, "eval_loader.dataset.split")
    if run.evaluation and data:
        for kind, key, name in (("accuracy", "accuracy", "masked accuracy"), ("cross entropy", "loss", "loss")):
            value = run.evaluation[key]
            results.append(EvalResult("fill-mask", data, data, kind, value, metric_name=name, dataset_split=split))
    card = ModelCardData(
        model_name=title if results else None,
        eval_results=results or None,
        license=None if checkpoint.published else "apache-2.0",
        library_name="transformers",
        pipeline_tag=TASKS.get(checkpoint.class_name) if checkpoint.tokenizer else None,
        tags=["lion", "linear-attention", checkpoint.config.get("mixer", "lion-s")],
        datasets=["nyu-mll/glue"] if any(r.dataset_type == "nyu-mll/glue" for r in _job_results(run.result)) else None,
    )
    return card.to_yaml().strip()


def _introduction(checkpoint: Checkpoint, run: Run) -> str:
    mixer = lion.LionConfig(**checkpoint.config).mixer
    variant = VARIANTS.get(mixer, mixer)
    text = f"A bidirectional encoder: BERT with {variant} ({PAPER})"
    if checkpoint.config.get("mixer") == "softmax":
        text = f"A bidirectional encoder with {variant}: the baseline of LION ({PAPER})"
    if run.result:
        text += f", fine-tuned on {run.result['title']}"
    elif checkpoint.class_name == "LionForMaskedLM":
        text += ", pretrained as a masked language model"
    if checkpoint.published:
        text += f". Converted from the paper's authors' {checkpoint.published}"
    return f"{text}. `{PROOF}` says how far the output of this folder, in plain transformers, is from its checkpoint's."


def _usage(checkpoint: Checkpoint, run: Run, name: str) -> str:
    task = TASKS.get(checkpoint.class_name)
    if checkpoint.tokenizer and task == "fill-mask":
        return "\n".join([
            "from transformers import pipeline", "",
            f'fill = pipeline("fill-mask", model="{name}", trust_remote_code=True)',
            'fill(f"She read the {fill.tokenizer.mask_token} from the first page to the last.")',
        ])  # fmt: skip
    if checkpoint.tokenizer and task == "text-classification":
        columns = (run.result or {}).get("settings", {}).get("task", {}).get("columns", ())
        text = '{"text": "One text.", "text_pair": "Another."}' if len(columns) == 2 else '"A text."'
        return "\n".join([
            "from transformers import pipeline", "",
            f'classify = pipeline("text-classification", model="{name}", trust_remote_code=True)',
            f"classify({text})",
        ])  # fmt: skip
    auto = auto_class(checkpoint.class_name)
    return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{name}", trust_remote_code=True)'


def _sizes(checkpoint: Checkpoint) -> Table:
    config = lion.LionConfig(**checkpoint.config)
    # Tied weights, the decoder's and the word embeddings', have two names and count once.
    parameters = sum(t.numel() for name, t in checkpoint.weights.items() if name != "head.decoder.weight")
    rows = [
        ["mixer", config.mixer],
        ["parameters", f"{parameters:,}"],
        ["layers", str(config.num_hidden_layers)],
        ["hidden size", f"{config.hidden_size:,}"],
        ["heads", str(config.num_attention_heads)],
        ["MLP size", f"{config.intermediate_size:,}"],
        ["vocabulary", f"{config.vocab_size:,}"],
    ]
    if config.has_positions:
        rows.append(["longest text", f"{config.max_position_embeddings:,} tokens"])
    classifies = checkpoint.class_name in ("LionForSequenceClassification", "LionForTokenClassification")
    if classifies and config.num_labels > 1:  # the one of a regression says nothing
        rows.append(["labels", ", ".join(map(str, config.id2label.values()))])
    return rows


def _training(checkpoint: Checkpoint, run: Run) -> Table:
    config, timestamp = run.config, checkpoint.timestamp
    counted = {"steps": "batch", "samples": "sample", "tokens": "token"}
    rows = [[name, f"{timestamp[key]:,}"] for name, key in counted.items() if timestamp.get(key)]
    if run.result:
        rows += [["task", run.result["title"]], ["seed", str(run.result["seed"])]]
        rows += [["training examples", f"{run.result['train_examples']:,}"]] if "train_examples" in run.result else []
        task = run.result.get("settings", {}).get("task", {})
        known = ("epochs", "batch_size", "optimizer", "lr", "weight_decay")
        return rows + [[key.replace("_", " "), str(task[key])] for key in known if key in task]
    tokenizer = _at(config, "tokenizer_name")
    if tokenizer and (tokenizer.startswith((".", "/", "~")) or Path(tokenizer).exists()):
        tokenizer = Path(tokenizer).name  # where it lies on this machine is nobody's business
    facts = {
        "data": _data(config),
        "split": _at(config, "train_loader.dataset.split"),
        "tokenizer": tokenizer,
        "tokens of a text, at most": _at(config, "max_seq_len"),
        "share masked": _at(config, "mlm_probability"),
        "samples of a step": _at(config, "global_train_batch_size"),
        "optimizer": _arguments(_at(config, "optimizer")),
        "schedule": _arguments(_at(config, "scheduler")),
        "precision": _at(config, "precision"),
        "seed": _at(config, "seed"),
    }
    return rows + [[name, str(value)] for name, value in facts.items() if value is not None]


def _evaluation(run: Run, scores: dict[str, Any] | None) -> str:
    parts = []
    if run.evaluation:
        share = _at(run.config, "eval_loader.dataset.mlm_probability")
        masked = "" if share is None else f", with {share:.0%} of the tokens masked"
        parts.append(
            f"At step {run.evaluation['step']:,}{masked}: masked accuracy {run.evaluation['accuracy']:.2%} (always"
            f" guessing the most frequent token: {run.evaluation['most_frequent_token']:.2%}), loss {run.evaluation['loss']:.3f}."
        )
    if run.result:
        lines = [
            [split, metric, f"{100 * value:.2f}"]
            for split, values in run.result.get("scores", {}).items()
            for metric, value in values.items()
        ]
        parts.append(markdown([["split", "metric", "score"], *lines]))
    if scores:
        lines = [
            [
                row["title"],
                " and ".join(row["metrics"]),
                f"{100 * row['mean']:.2f}",
                report.lacking(row) or str(len(row["seeds"])),
            ]
            for row in scores["tasks"]
        ]
        if scores.get("glue") is not None:
            lines.append(["GLUE average", "", report.average(scores["glue"], scores["tasks"]), ""])
        table = markdown([["task", "metric", "score", "seeds"], *lines])
        parts.append(f"Fine-tuned from this checkpoint, the mean over seeds:\n\n{table}")
    return "\n\n".join(parts)


def _glue_results(scores: dict[str, Any]) -> list[EvalResult]:
    return [
        _task_result(row["task"], row["title"], " and ".join(row["metrics"]), row["mean"], None, report.of_glue(row))
        for row in scores["tasks"]
    ]


def _job_results(result: dict[str, Any] | None) -> list[EvalResult]:
    return [
        _task_result(result["task"], result["title"], metric, value, split, report.of_glue(result))
        for split, values in (result or {}).get("scores", {}).items()
        for metric, value in values.items()
    ]  # fmt: skip


def _task_result(task: str, title: str, metric: str, value: float, split: str | None, of_glue: bool) -> EvalResult:
    dataset = {"dataset_type": "nyu-mll/glue", "dataset_config": task} if of_glue else {"dataset_type": task}
    name = f"GLUE {title}" if of_glue else title
    return EvalResult(
        "text-classification", dataset_name=name, dataset_split=split, metric_type=metric, metric_value=value, **dataset
    )


def _licence(checkpoint: Checkpoint) -> str:
    if checkpoint.published:
        return "The modelling code: Apache 2.0. The weights are the paper's authors'."
    return "Apache 2.0."


def _at(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of a config; None where there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _data(config: dict[str, Any]) -> str | None:
    local = _at(config, "data_local")
    return Path(local).name if local else None


def _arguments(section: dict[str, Any] | None) -> str | None:
    if not section:
        return None
    arguments = ", ".join(f"{key} {value}" for key, value in section.items() if key != "name")
    return f"{section['name']} ({arguments})" if arguments else section["name"]


def _rows(rows: Table) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in rows)


def _read(path: Path) -> dict[str, Any]:
    """A YAML or JSON file; nothing where there is none that can be read."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError, OSError):
        return {}
    return content if isinstance(content, dict) else {}

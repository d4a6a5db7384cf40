"""What a model card says: facts of the checkpoint and of its run's folder, and nothing where they are not known."""

import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import VOCABULARY, write_jsonl

from src.checkpoints.reading import Checkpoint, read_checkpoint
from src.errors import UserError
from src.glue.experiment import GlueExperiment
from src.jobs.report import write as write_report
from src.lion import configuration_lion, mixers
from src.publish.card import model_card, read_scores

EVALUATIONS = [
    {"step": batch, "samples": 8 * batch, "seconds": 1.0,
     "eval": {"eval/LanguageCrossEntropy": loss, "eval/MaskedAccuracy": accuracy,
              "eval/MostFrequentTokenAccuracy": 0.0625}}
    for batch, loss, accuracy in ((600, 3.5, 0.25), (1200, 2.5, 0.375), (1800, 1.5, 0.5))
]  # fmt: skip
RESULT = {
    "task": "rte", "title": "RTE", "seed": 19, "metrics": ["accuracy"], "scores": {"dev": {"accuracy": 0.625}},
    "score": 0.625, "majority": 0.5, "train_examples": 2490, "variant": "", "folder": "rte-19",
    "settings": {"task": {"columns": ["sentence1", "sentence2"], "epochs": 2, "lr": 1e-5}},
}  # fmt: skip


def metadata(card: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])


@pytest.fixture
def checkpoint(tmp_path, write_checkpoint, write_config) -> Checkpoint:
    """The checkpoint of step 1,200 in the folder of its run, which went on to step 1,800."""
    from src.config import load, to_dict
    from src.mlm.task import PretrainConfig

    config = load(PretrainConfig, "main.py", [str(write_config(tmp_path))])
    path = write_checkpoint(tmp_path / "run" / "checkpoint.pt")
    (path.parent / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (path.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in EVALUATIONS))
    return read_checkpoint(path)


def test_a_card_states_sizes_steps_recipe_and_the_evaluation_of_that_step(checkpoint):
    card = model_card(checkpoint, "my-model")
    parameters = sum(p.numel() for p in checkpoint.build().parameters())
    for fact in (
        "# tiny\n", "LION-S", "- mixer: lion-s", f"- parameters: {parameters:,}\n", "- layers: 1", "- hidden size: 32",
        "- steps: 1,200", "- samples: 9,600", "- data: data.jsonl\n", "- split: train",
        f"- tokenizer: BertTokenizer with {len(VOCABULARY)} tokens, lower case\n",
        "- maximum sequence length in training: 32",
        "- masking rate: 0.3", "- batch size: 8", "- optimizer: decoupled_adamw (", "lr 0.0008",
        "- schedule: linear_decay_with_warmup (", "t_warmup 0.06dur", "- seed: 17",
        "At step 1,200, with 15% of the tokens masked: masked accuracy 37.50%, "
        "accuracy of always predicting the most frequent token 6.25%, loss 2.500.",
        'pipeline("fill-mask", model="my-model", trust_remote_code=True)', "Apache 2.0",
        "@inproceedings{afzal2025linear",
    ):  # fmt: skip
        assert fact in card, fact
    assert "- maximum sequence length:" not in card  # lion-s has no position table
    assert "precision" not in card  # the run took its default, and did not write it down


def test_an_evaluation_of_an_earlier_step_is_not_a_result_of_the_weights(checkpoint):
    checkpoint.timestamp["batch"] += 100
    card = model_card(checkpoint, "my-model")
    assert "At step 1,200" in card and "model-index" not in metadata(card)


def test_a_new_mixer_has_a_card(checkpoint, monkeypatch):
    monkeypatch.setattr(configuration_lion, "MIXERS", ("lion-x",))
    monkeypatch.setitem(mixers.MIXERS, "lion-x", mixers.MIXERS["lion-s"])
    checkpoint.config.mixer = "lion-x"
    assert "BERT with lion-x (" in model_card(checkpoint, "my-model")


def test_the_metadata_is_valid_for_the_hub(checkpoint):
    data = metadata(model_card(checkpoint, "my-model"))
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "fill-mask"
    assert data["license"] == "apache-2.0"
    [model] = data["model-index"]
    assert model["name"] == "tiny"
    [result] = model["results"]
    assert result["task"]["type"] == "fill-mask"
    assert result["dataset"] == {"name": "data.jsonl", "type": "data.jsonl", "split": "val"}
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {"accuracy": 0.375, "cross entropy": 2.5}


@pytest.mark.parametrize(
    ("source", "name", "hub_id"),
    [
        ({"dataset": "allenai/c4", "data_subset": "en", "hub_split": "train"}, "allenai/c4 (en)", "allenai/c4"),
        ({"dataset": "org/texts", "data_subset": None}, "org/texts", "org/texts"),
        ({"data_files": ["/home/me/a.txt", "corpus/*.jsonl.zst"], "files": 9}, "a.txt, corpus/*.jsonl.zst", None),
        ({"dataset": "/home/me/parquet", "data_subset": "default"}, "parquet", None),
        (None, "copy", None),  # shards of an earlier version, or elsewhere
    ],
    ids=["subset", "dataset", "files", "folder", "unknown"],
)
def test_the_data_is_named_by_its_source(checkpoint, tmp_path, source, name, hub_id):
    for split in ("train", "val"):
        (tmp_path / "copy" / split).mkdir(parents=True)
        (tmp_path / "copy" / split / "split.json").write_text(json.dumps({"samples": 9, "source": source}))
    path = checkpoint.path.parent / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["train_loader"]["dataset"]["local"] = config["eval_loader"]["dataset"]["local"] = str(tmp_path / "copy")
    path.write_text(yaml.safe_dump(config))
    card = model_card(checkpoint, "my-model")
    assert f"- data: {name}\n" in card
    assert metadata(card).get("datasets") == (hub_id and [hub_id])
    dataset = metadata(card)["model-index"][0]["results"][0]["dataset"]
    assert (dataset["name"], dataset["type"]) == (name, hub_id or name)


@pytest.mark.parametrize(
    ("start", "shown"),
    [("/home/me/runs/long/latest-rank0.pt", "long/latest-rank0.pt"), ("org/encoder", "org/encoder"), (None, None)],
)
def test_a_card_names_what_training_started_from(checkpoint, start, shown):
    path = checkpoint.path.parent / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["pretrained_checkpoint"] = start
    path.write_text(yaml.safe_dump(config))
    card = model_card(checkpoint, "my-model")
    assert f"- started from: {shown}\n" in card if shown else "started from" not in card


def test_the_data_of_several_streams_is_named_by_their_sources(checkpoint, tmp_path):
    sources = {"c4": {"dataset": "allenai/c4", "data_subset": "en"}, "own": {"data_files": ["/home/me/a.txt"]}}
    for name, source in sources.items():
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "split.json").write_text(json.dumps({"source": source}))
    path = checkpoint.path.parent / "config.yaml"
    config = yaml.safe_load(path.read_text())
    streams = {name: {"local": str(tmp_path / name), "proportion": 0.5} for name in sources}
    config["train_loader"]["dataset"]["streams"] = streams
    path.write_text(yaml.safe_dump(config))
    card = model_card(checkpoint, "my-model")
    assert "- data: allenai/c4 (en), a.txt\n" in card
    assert "datasets" not in metadata(card)


def test_a_hub_tokenizer_is_named_and_a_cased_one_described(checkpoint):
    path = checkpoint.path.parent / "config.yaml"
    config = yaml.safe_load(path.read_text())
    checkpoint.tokenizer["tokenizer_config.json"]["content"]["do_lower_case"] = False
    assert "tokens, case-sensitive\n" in model_card(checkpoint, "my-model")
    path.write_text(yaml.safe_dump({**config, "tokenizer_name": "google-bert/bert-base-uncased"}))
    assert "- tokenizer: google-bert/bert-base-uncased\n" in model_card(checkpoint, "my-model")


@pytest.mark.parametrize("spoil", ["nothing there", "another run", "cut"])
def test_unknown_facts_are_omitted(checkpoint, spoil):
    folder = checkpoint.path.parent
    if spoil == "nothing there":
        (folder / "config.yaml").unlink()
        (folder / "metrics.jsonl").unlink()
    elif spoil == "another run":
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text.replace("run_name: tiny", "run_name: other"))
    else:
        (folder / "config.yaml").write_text("run_name: [tiny")
    card = model_card(checkpoint, "my-model")
    assert "- steps: 1,200" in card
    assert "## Evaluation" not in card
    assert "optimizer" not in card
    assert "model-index" not in metadata(card)
    assert "None" not in card


def test_a_checkpoint_without_times_or_tokenizer_has_a_card(checkpoint):
    checkpoint.tokenizer, checkpoint.timestamp, checkpoint.run_name = {}, {}, None
    card = model_card(checkpoint, "my-model")
    assert "# my-model\n" in card
    assert "## Training" not in card
    assert 'AutoModelForMaskedLM.from_pretrained("my-model", trust_remote_code=True)' in card
    assert "pipeline_tag" not in metadata(card)


def test_glue_scores_are_in_table_and_metadata(checkpoint, tmp_path):
    results = [{**RESULT, "seed": seed, "score": score} for seed, score in ((19, 0.625), (717, 0.6875))]
    own = {**RESULT, "task": "word_order", "title": "WordOrder", "metrics": ["matthews"], "score": 0.5}
    write_report([*results, own], GlueExperiment.averages, tmp_path, "tiny-glue")
    for path in (tmp_path, tmp_path / "report.json"):
        card = model_card(checkpoint, "my-model", read_scores(path))
        assert re.search(r"\| RTE +\| accuracy +\| 65\.62 +\| +2 \|", card), card
        found = {
            result["dataset"]["type"]: result["metrics"][0]["value"]
            for result in metadata(card)["model-index"][0]["results"]
        }
        assert found == {"nyu-mll/glue": 0.65625, "word_order": 0.5, "data.jsonl": 0.375}


def test_scores_name_failed_seeds_and_non_glue_examples(checkpoint, tmp_path):
    write_report([{**RESULT, "of": 5, "glue": False}], GlueExperiment.averages, tmp_path, "tiny-glue")
    card = model_card(checkpoint, "my-model", read_scores(tmp_path))
    assert re.search(r"\| RTE +\| accuracy +\| 62\.50 +\| +1 of 5 seeds \|", card), card
    assert "nyu-mll/glue" not in card


def test_a_file_that_is_not_a_glue_report_is_refused(tmp_path):
    write_jsonl(tmp_path / "report.json", ["a", "b"])
    for path in (tmp_path, tmp_path / "report.json", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=re.escape(f"--glue {path}")):
            read_scores(path)


@pytest.fixture
def classifier(tmp_path, checkpoint) -> Checkpoint:
    """A fine-tuned checkpoint in the folder of its job."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "result.json").write_text(json.dumps(RESULT))
    checkpoint.config.id2label = {0: "entailment", 1: "not_entailment"}
    checkpoint.path, checkpoint.run_name = Path(tmp_path, "job", "latest-rank0.pt"), "tiny-glue-rte-19"
    checkpoint.class_name = "LionForSequenceClassification"
    return checkpoint


def test_a_classifiers_card_states_task_labels_and_scores(classifier):
    card = model_card(classifier, "my-model")
    for fact in (
        "fine-tuned on RTE", "- labels: entailment, not_entailment", "- training examples: 2,490", "- epochs: 2",
        "62.50",
        'classify({"text": "One text.", "text_pair": "Another."})',
    ):  # fmt: skip
        assert fact in card, fact
    data = metadata(card)
    assert data["pipeline_tag"] == "text-classification"
    assert data["datasets"] == ["nyu-mll/glue"]
    [result] = data["model-index"][0]["results"]
    assert result["dataset"] == {"name": "GLUE RTE", "type": "nyu-mll/glue", "config": "rte", "split": "dev"}


def test_a_classifier_of_non_glue_examples_does_not_name_glue(classifier):
    (classifier.path.parent / "result.json").write_text(json.dumps({**RESULT, "glue": False}))
    assert "nyu-mll/glue" not in model_card(classifier, "my-model")


def test_a_searchs_job_is_identified_by_its_folder(classifier):
    (classifier.path.parent / "result.json").write_text(json.dumps({**RESULT, "folder": "rte-lr=1e-05-19"}))
    assert "fine-tuned on RTE" not in model_card(classifier, "my-model")
    classifier.run_name = "tiny-glue-rte-lr=1e-05-19"
    assert "fine-tuned on RTE" in model_card(classifier, "my-model")


def test_a_regression_has_no_label_names(classifier):
    classifier.config.id2label = {0: "LABEL_0"}
    assert "LABEL_0" not in model_card(classifier, "my-model")


def test_the_result_of_another_job_is_omitted(classifier):
    classifier.run_name = "tiny-glue-rte-717"
    card = model_card(classifier, "my-model")
    assert "RTE" not in card
    assert 'classify("A text.")' in card


def test_an_imported_checkpoints_card_names_its_source_and_no_licence(checkpoint):
    checkpoint.published = "LIONS-EPFL/LION-S-base-mlm"
    card = model_card(checkpoint, "my-model")
    assert "Converted from the paper's authors' LIONS-EPFL/LION-S-base-mlm" in card
    assert "license" not in metadata(card)
    assert "## Evaluation" not in card  # what lies beside the file is not its run's

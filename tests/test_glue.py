"""Fine-tuning: the official files, the tasks as data, the scores, the encoder it starts from, and a run of two tasks."""

import json
import random
import re
from pathlib import Path

import pytest
import scipy.stats
import sklearn.metrics
import torch
import yaml
from composer.devices import DeviceCPU
from conftest import ROOT, TINY_MODEL, assert_one_sentence, run, sentences, snapshot

import glue
from src.cli import UserError
from src.composer_models import LionClassifier
from src.config import FinetuneConfig, load
from src.glue import report
from src.glue.data import Batches, Example, loader, read_hub, read_task, read_tsv
from src.glue.jobs import build_model, mean_score, predict, read_start, score
from src.glue.tasks import GLUE, select

PNG = b"\x89PNG\r\n\x1a\n"
MNLI_TRAIN = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label".split()  # fmt: skip
MNLI_DEV = [*MNLI_TRAIN[:-1], "label2", "label3", "label4", "label5", "gold_label"]
# Task → header, a row, and what should come of it.
OFFICIAL = {
    "cola": (None, ["gj04", "0", "*", "They \"drank' the pub."], Example(("They \"drank' the pub.",), 0)),
    "sst2": (["sentence", "label"], ['"a charming journey ', "1"], Example(('"a charming journey ',), 1)),
    "mrpc": (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["1", "7", "8", 'He said "no .', 'No " , he said .'], Example(('He said "no .', 'No " , he said .'), 1)),
    "stsb": ("index genre filename year old_index source1 source2 sentence1 sentence2 score".split(), ["0", "main", "MSRvid", "2012", "1", "none", "none", "A man.", "A “man”.", "3.800"], Example(("A man.", "A “man”."), 3.8)),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate".split(), ["1", "2", "3", "Why?", "Why not?", "0"], Example(("Why?", "Why not?"), 0)),
    "qnli": (["index", "question", "sentence", "label"], ["0", "Who?", "He.", "not_entailment"], Example(("Who?", "He."), 1)),
    "rte": (["index", "sentence1", "sentence2", "label"], ["0", "It rains.", "It is wet.", "entailment"], Example(("It rains.", "It is wet."), 0)),
    "mnli": (MNLI_TRAIN, [*("0 1n 1n fiction ( ( ) ( ( )".split()[:6]), "p", "p", "Premise.", "Hypothesis.", "neutral", "contradiction"], Example(("Premise.", "Hypothesis."), 2)),
}  # fmt: skip


def write_tsv(path: Path, header: list[str] | None, rows: list[list[str]], bom: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in ([header] if header else []) + rows]
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + "".join(f"{line}\n" for line in lines).encode())
    return path


# The official files


@pytest.mark.parametrize("bom", [False, True], ids=["", "bom"])
@pytest.mark.parametrize("name", OFFICIAL)
def test_the_official_files_of_each_task_are_read(tmp_path, name, bom):
    header, row, expected = OFFICIAL[name]
    task = GLUE[name]
    write_tsv(tmp_path / task.folder / "train.tsv", header, [row, row], bom)
    dev_header, dev_row = (header, row)
    if name == "mnli":
        dev_header, dev_row = MNLI_DEV, [*row[:-1], "neutral", "neutral", "neutral", "neutral", row[-1]]
    files = ["dev_matched", "dev_mismatched"] if name == "mnli" else ["dev"]
    for file in files:
        write_tsv(tmp_path / task.folder / f"{file}.tsv", dev_header, [dev_row], bom)
    train, validation = read_task(task, str(tmp_path))
    assert train == [expected, expected]
    assert validation == {file: [expected] for file in files}


def test_the_eight_tasks_have_their_official_folders_and_metrics():
    assert {task.name: (task.folder, task.metrics, task.num_labels) for task in GLUE.values()} == {
        "mnli": ("MNLI", ("accuracy",), 3), "rte": ("RTE", ("accuracy",), 2), "qqp": ("QQP", ("accuracy", "f1"), 2),
        "qnli": ("QNLI", ("accuracy",), 2), "sst2": ("SST-2", ("accuracy",), 2), "stsb": ("STS-B", ("spearman",), 1),
        "mrpc": ("MRPC", ("f1",), 2), "cola": ("CoLA", ("matthews",), 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sst2", "sentence\tlabel\ngood\t1\nbad\n", ["train.tsv, line 3", "1 columns instead of 2"]),
        ("sst2", "sentence\tlabel\ngood\tvery\t1\n", ["train.tsv, line 2", "3 columns instead of 2"]),
        ("sst2", "sentence\tlabel\ngood\t1\nbad\tno\n", ["train.tsv, line 3", "'no'", "negative, positive"]),
        ("sst2", "sentence\tlabel\ngood\t2\n", ["train.tsv, line 2", "'2'"]),
        ("sst2", "sentence\tlabel\ngood\t-1\n", ["train.tsv, line 2", "'-1'"]),
        ("sst2", "sentence\tlabel\ngood\t0.5\n", ["train.tsv, line 2", "'0.5'"]),
        ("sst2", "text\tlabel\ngood\t1\n", ["train.tsv", "sentence", "text, label"]),
        ("sst2", "sentence\tlabel\n", ["train.tsv", "no examples"]),
        ("sst2", "", ["train.tsv", "no examples"]),
        ("cola", "gj04\t1\t\tGood.\ngj04\t1\n", ["train.tsv, line 2", "2 columns instead of 4"]),
        ("cola", "gj04\t1\n", ["train.tsv, line 1", "2 columns"]),
        ("rte", "index\tsentence1\tsentence2\n0\ta\tb\n", ["train.tsv", "label"]),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tmuch\n", ["train.tsv, line 2", "'much'", "a number"]),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", ["train.tsv, line 2", "'nan'"]),
        ("sst2", None, ["train.tsv", "SST-2", "tasks_to_run"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_file_and_line(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(UserError) as error:
        read_tsv(GLUE[name], tmp_path / "train.tsv")
    for word in words:
        assert word in str(error.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    (tmp_path / "dev.tsv").write_bytes(b"sentence\tlabel\ngood\t1\nb\xe4d\t0\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 3: not valid UTF-8"):
        read_tsv(GLUE["sst2"], tmp_path / "dev.tsv")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"glue_dir: the folder \S+nowhere does not exist"):
        read_task(GLUE["sst2"], str(tmp_path / "nowhere"))


def test_a_silent_hub_is_told_in_one_sentence():
    with pytest.raises(UserError, match=r"nyu-mll/glue \(sst2\).*set glue_dir"):
        read_hub(GLUE["sst2"], "train")


# The tasks as data


def test_without_a_choice_the_eight_tasks_run_with_their_own_seeds():
    tasks = select([], {}, 7)
    assert [task.name for task in tasks] == list(GLUE)
    assert all(task.seeds == GLUE[task.name].seeds for task in tasks)


def test_tasks_run_in_the_order_asked_for_with_what_the_config_changes():
    rte, sst2 = select(["rte", "sst2"], {"rte": {"lr": 0.5, "seeds": [1, 2]}, "sst2": {"seeds": []}}, 7)
    assert (rte.name, rte.lr, rte.seeds, rte.epochs) == ("rte", 0.5, (1, 2), GLUE["rte"].epochs)
    assert sst2.seeds == (7,)  # default_seed


def test_like_takes_what_is_not_given_from_a_task_of_glue():
    (task,) = select(
        ["mine"], {"mine": {"like": "rte", "title": "Mine", "folder": "Mine", "labels": ["a", "b", "c"]}}, 7
    )
    assert (task.name, task.title, task.folder, task.num_labels) == ("mine", "Mine", "Mine", 3)
    assert (task.tsv_columns, task.tsv_label, task.metrics, task.seeds) == (("sentence1", "sentence2"), "label", ("accuracy",), GLUE["rte"].seeds)  # fmt: skip


@pytest.mark.parametrize(
    ("to_run", "changes", "words"),
    [
        (["sst"], {}, ["tasks_to_run", "unknown task sst", "did you mean"]),
        (["zzz"], {}, ["unknown task zzz", "known are", "mnli"]),
        ([], {"rte": {"learning_rate": 1}}, ["unknown key tasks.rte.learning_rate"]),
        ([], {"rte": {"epoch": 1}}, ["unknown key tasks.rte.epoch", "did you mean epochs?"]),
        ([], {"rte": {"name": "other"}}, ["tasks.rte.name"]),
        ([], {"rte": {"metrics": ["acuracy"]}}, ["tasks.rte.metrics", "acuracy", "did you mean accuracy?"]),
        ([], {"rte": {"metrics": "accuracy"}}, ["tasks.rte.metrics"]),
        ([], {"mine": {"like": "rt"}}, ["tasks.mine.like", "rt", "did you mean rte?"]),
        ([], {"mine": {"lr": 1.0}}, ["tasks.mine", "metrics", "columns", "like:"]),
        ([], {"rte": 5}, ["tasks.rte"]),
        ([], {"rte": {"seeds": 19}}, ["tasks.rte.seeds"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_tasks_is_named(to_run, changes, words):
    with pytest.raises(UserError) as error:
        select(to_run, changes, 7)
    for word in words:
        assert word in str(error.value)


# Scores


def reference(metric: str, prediction: torch.Tensor, labels: torch.Tensor) -> float:
    if metric == "spearman":
        return float(scipy.stats.spearmanr(prediction, labels).statistic)
    guess = prediction.argmax(-1)
    return {
        "accuracy": sklearn.metrics.accuracy_score,
        "f1": sklearn.metrics.f1_score,
        "matthews": sklearn.metrics.matthews_corrcoef,
    }[metric](labels, guess)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GLUE)
def test_scores_are_those_of_scikit_learn_and_scipy(name, seed):
    task, draw = GLUE[name], torch.Generator().manual_seed(seed)
    if task.labels:
        logits, labels = torch.randn(200, task.num_labels, generator=draw), torch.randint(task.num_labels, (200,), generator=draw)  # fmt: skip
        logits[torch.arange(200), labels] += 1
    else:  # with ties, as people give whole numbers
        labels = torch.randint(6, (200,), generator=draw).float()
        logits = (labels + torch.randn(200, generator=draw)).round(decimals=1)
    got = score(task, logits, labels)
    assert tuple(got) == task.metrics
    for metric, value in got.items():
        assert value == pytest.approx(reference(metric, logits, labels), abs=1e-6)
        assert 0.2 < value < 1


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize(("name", "zero"), [("sst2", False), ("mrpc", False), ("cola", True)])
def test_always_the_same_class_scores_as_in_scikit_learn(name, zero, chosen):
    task, labels = GLUE[name], torch.tensor([0, 1, 1, 0, 1, 1])
    logits = torch.zeros(6, 2)
    logits[:, chosen] = 1
    (value,) = score(task, logits, labels).values()
    assert value == pytest.approx(reference(task.metrics[0], logits, labels))
    if zero:
        assert value == 0


def test_always_the_same_value_has_no_correlation():
    assert score(GLUE["stsb"], torch.full((6,), 2.5), torch.arange(6.0)) == {"spearman": 0.0}


def test_a_tasks_score_is_the_mean_of_its_metrics_and_splits():
    assert mean_score({"a": {"accuracy": 0.5, "f1": 0.7}, "b": {"accuracy": 0.9, "f1": 0.1}}) == pytest.approx(0.55)


def result(task: str, seed: int, value: float) -> dict:
    return {"task": task, "title": GLUE[task].title, "metrics": list(GLUE[task].metrics), "majority": 0.5, "seed": seed, "score": value}  # fmt: skip


def test_the_report_has_mean_and_deviation_over_seeds_and_the_average_of_all_eight_tasks_only():
    results = [result(name, 19, 0.8) for name in GLUE if name != "rte"]
    rows = report.summarize([*results, result("rte", 1, 0.5), result("rte", 2, 0.7)])
    rte = rows[-1]
    assert (rte["mean"], rte["std"]) == pytest.approx((0.6, 0.02**0.5))
    assert rte["seeds"] == {"1": 0.5, "2": 0.7}
    assert report.glue_average(rows) == pytest.approx((7 * 0.8 + 0.6) / 8)
    assert "GLUE average: 77.50" in report.closing(rows)
    assert "60.00 ± 14.14" in report.table(rows)
    assert report.glue_average(rows[:-1]) is None
    assert "not without RTE" in report.closing(rows[:-1])


# The model it starts from


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pretrained") / "checkpoint.pt")


@pytest.fixture
def config(tmp_path, checkpoint):
    """config(key=value, ...): the checked config of a run from the tiny checkpoint."""

    def make(*overrides: str) -> FinetuneConfig:
        path = tmp_path / "f.yaml"
        path.write_text(f"inherit: {ROOT}/yamls/finetune-glue/recipe.yaml\nbase_run_name: tiny\nmax_seq_len: 64\ndevice: cpu\n")  # fmt: skip
        return load(FinetuneConfig, "glue.py", [str(path), f"starting_checkpoint_load_path={checkpoint}", *overrides])

    return make


@pytest.mark.parametrize("name", ["rte", "stsb", "mnli"])
def test_the_encoder_is_loaded_whole(config, checkpoint, name):
    model = build_model(read_start(config()), GLUE[name])
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    own = model.lion.state_dict()
    fresh = {name for name in own if f"model.lion.{name}" not in state}
    assert fresh == {"pooler.weight", "pooler.bias"}
    assert all(torch.equal(own[name], state[f"model.lion.{name}"]) for name in own.keys() - fresh)
    assert model.classifier.out_features == GLUE[name].num_labels
    if GLUE[name].labels:
        assert tuple(model.config.id2label.values()) == GLUE[name].labels


def test_from_scratch_takes_the_sizes_and_no_weights(config, checkpoint):
    start = read_start(config("from_scratch=true"))
    assert start.weights is None
    assert start.config["hidden_size"] == TINY_MODEL["hidden_size"]
    own = build_model(start, GLUE["rte"]).lion.state_dict()
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    assert not torch.equal(own["layers.0.mlp_in.weight"], state["model.lion.layers.0.mlp_in.weight"])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.num_hidden_layers=2", ["misses", "layers.1.attention.qkv.weight", "layers.1.mlp_out.bias"]),
        ("model.mixer=lion-d", ["misses layers.0.attention.decay", "no place for layers.0.attention.decay.bias"]),
        ("model.intermediate_size=32", ["another shape of layers.0.mlp_in.bias"]),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_name(config, override, names):
    with pytest.raises(UserError) as error:
        build_model(read_start(config(override)), GLUE["rte"])
    for name in names:
        assert name in str(error.value)


def test_a_start_that_is_not_given_or_not_there_is_named(config):
    with pytest.raises(UserError, match="starting_checkpoint_load_path is not set"):
        read_start(config("starting_checkpoint_load_path=null"))
    with pytest.raises(UserError, match=r"nowhere\.pt is not a file"):
        read_start(config("starting_checkpoint_load_path=nowhere.pt"))


@pytest.mark.parametrize("mixer", ["lion-s", "softmax"])
@pytest.mark.parametrize("name", ["sst2", "rte", "stsb"])
def test_padding_to_the_longest_does_not_change_predictions(config, write_checkpoint, tmp_path, mixer, name):
    checkpoint = write_checkpoint(tmp_path / "c.pt", mixer)
    start = read_start(config(f"starting_checkpoint_load_path={checkpoint}"))
    task = GLUE[name]
    torch.manual_seed(0)
    model = LionClassifier(build_model(start, task), start.tokenizer, [])
    torch.nn.init.normal_(model.model.classifier.weight)
    texts = ["dog", *sentences(8), "a song"]
    examples = [Example((text, texts[i - 1])[: len(task.columns)], float(i % 2)) for i, text in enumerate(texts)]
    batches = Batches(start.tokenizer, 64, regression=not task.labels)
    alone, together = (predict(model, loader(examples, batches, size), DeviceCPU())[0] for size in (1, len(examples)))
    assert alone.std() > 0.01
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


# A run


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory) -> Path:
    """SST-2 and STS-B of a few rows, in the official layout."""
    folder, draw = tmp_path_factory.mktemp("glue"), random.Random(5)
    for file, count in (("train", 24), ("dev", 10)):
        texts = sentences(count, seed=count)
        write_tsv(folder / "SST-2" / f"{file}.tsv", OFFICIAL["sst2"][0], [[text, str(i % 2)] for i, text in enumerate(texts)])  # fmt: skip
        rows = [[*OFFICIAL["stsb"][1][:7], text, draw.choice(texts), f"{draw.uniform(0, 5):.3f}"] for text in texts]
        write_tsv(folder / "STS-B" / f"{file}.tsv", OFFICIAL["stsb"][0], rows)
    return folder


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, glue_dir, checkpoint):
    """Arguments, save_folder and output of a run of two tasks, one of them with two seeds."""
    folder = tmp_path_factory.mktemp("finetuned")
    task = {"epochs": 1, "batch_size": 8, "seeds": [19], "eval_interval": "1ep"}
    settings = {
        "inherit": str(ROOT / "yamls" / "finetune-glue" / "recipe.yaml"),
        "base_run_name": "tiny-glue",
        "tasks_to_run": ["sst2", "stsb"],
        "tasks": {"sst2": {**task, "seeds": [19, 20]}, "stsb": task},
        "glue_dir": str(glue_dir),
        "starting_checkpoint_load_path": str(checkpoint),
        "max_seq_len": 64,
        "device": "cpu",
        "save_folder": str(folder / "run"),
    }
    path = folder / "finetune.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = run("glue.py", path, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [str(path)], folder / "run", done


def test_a_run_prints_its_table_and_leaves_report_picture_and_predictions(finetuned):
    _, folder, done = finetuned
    for row in (r"\| SST-2 +\| accuracy +\| +50\.00 \| +\d+\.\d\d ± \d+\.\d\d", r"\| STS-B +\| spearman +\| +0\.00 \|"):
        assert re.search(row, done.stdout), done.stdout
    assert "GLUE average: not without MNLI" in done.stdout
    assert "3 jobs (SST-2, STS-B)" in done.stderr
    written = json.loads((folder / "report.json").read_text())
    assert [row["task"] for row in written["tasks"]] == ["sst2", "stsb"]
    assert set(written["tasks"][0]["seeds"]) == {"19", "20"}
    assert written["glue"] is None
    assert "| SST-2 " in (folder / "report.md").read_text()
    assert (folder / "report.png").read_bytes().startswith(PNG)
    assert {path.name for path in (folder / "jobs").iterdir()} == {"sst2-19", "sst2-20", "stsb-19"}


def test_the_scores_of_a_run_follow_from_its_predictions(finetuned, glue_dir):
    for place in (finetuned[1] / "jobs").iterdir():
        rows = [json.loads(line) for line in (place / "predictions-dev.jsonl").read_text().splitlines()]
        task = GLUE[place.name.split("-")[0]]
        assert [row["label"] for row in rows] == pytest.approx([e.label for e in read_tsv(task, glue_dir / task.folder / "dev.tsv")])  # fmt: skip
        written = json.loads((place / "result.json").read_text())
        expected = reference(task.metrics[0], torch.tensor([row["logits"] for row in rows]), torch.tensor([row["label"] for row in rows]))  # fmt: skip
        assert written["score"] == pytest.approx(expected, abs=1e-6)


def test_the_same_command_again_trains_nothing_and_shows_the_same_table(finetuned, capsys, caplog):
    arguments, folder, done = finetuned
    jobs = snapshot(folder / "jobs")
    with caplog.at_level("INFO", logger="lion"):
        glue.main(arguments)
    assert caplog.text.count("done earlier") == 3
    assert snapshot(folder / "jobs") == jobs
    assert capsys.readouterr().out == done.stdout


def test_a_changed_learning_rate_runs_that_task_again_and_no_other(finetuned, caplog):
    arguments, folder, _ = finetuned
    jobs = snapshot(folder / "jobs")
    with caplog.at_level("INFO", logger="lion"):
        glue.main([*arguments, "tasks.stsb.lr=0.5"])
    assert caplog.text.count("done earlier") == 2
    now = snapshot(folder / "jobs")
    changed = {name.split("/")[0] for name in now if now[name] != jobs.get(name)}
    assert changed == {"stsb-19"}
    assert now["stsb-19/predictions-dev.jsonl"][0] != jobs["stsb-19/predictions-dev.jsonl"][0]
    lines = [json.loads(line) for line in now["stsb-19/metrics.jsonl"][0].splitlines()]
    assert [line["batch"] for line in lines if "loss" in line] == [3]  # of the new run alone


def test_a_missing_file_is_told_before_any_task_is_trained(finetuned, tmp_path):
    with pytest.raises(UserError, match=r"RTE.train\.tsv is not there"):
        glue.main([*finetuned[0], "tasks_to_run=[sst2,rte]", f"save_folder={tmp_path / 'run'}"])
    assert not list(tmp_path.rglob("result.json"))


def test_a_mistake_ends_the_command_in_one_sentence(finetuned):
    assert_one_sentence(run("glue.py", *finetuned[0], "taks_to_run=[sst2]"), "unknown key taks_to_run", "tasks_to_run")

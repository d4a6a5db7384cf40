"""The tasks as data, and what a config changes in them."""

import pytest

from src.errors import UserError
from src.glue.tasks import GLUE, of_glue, select

OWN = {"columns": ["text"], "files": {"train": "a.csv", "validation": "b.csv"}}


def test_the_eight_tasks_have_their_official_folders_and_metrics():
    assert {task.name: (task.folder, task.metrics, task.num_labels) for task in GLUE.values()} == {
        "mnli": ("MNLI", ("accuracy",), 3), "rte": ("RTE", ("accuracy",), 2), "qqp": ("QQP", ("accuracy", "f1"), 2),
        "qnli": ("QNLI", ("accuracy",), 2), "sst2": ("SST-2", ("accuracy",), 2), "stsb": ("STS-B", ("spearman",), 1),
        "mrpc": ("MRPC", ("f1",), 2), "cola": ("CoLA", ("matthews",), 2),
    }  # fmt: skip
    assert [task.name for task in GLUE.values() if task.precision == "fp32"] == ["stsb"]
    assert [task.name for task in GLUE.values() if task.malformed_rows] == ["qqp"]


def test_by_default_the_eight_tasks_run_with_their_own_seeds():
    tasks = select([], {}, 7)
    assert [task.name for task in tasks] == list(GLUE)
    assert all(task.seeds == GLUE[task.name].seeds for task in tasks)


def test_tasks_run_in_the_given_order_with_the_configs_changes():
    rte, sst2 = select(["rte", "sst2"], {"rte": {"lr": 0.5, "seeds": [1, 2]}, "sst2": {"seeds": []}}, 7)
    assert (rte.name, rte.lr, rte.seeds, rte.epochs) == ("rte", 0.5, (1, 2), GLUE["rte"].epochs)
    assert sst2.seeds == (7,)  # default_seed


def test_like_takes_defaults_from_a_glue_task():
    (task,) = select(
        ["mine"], {"mine": {"like": "rte", "title": "Mine", "folder": "Mine", "labels": ["a", "b", "c"]}}, 7
    )
    assert (task.name, task.title, task.folder, task.num_labels) == ("mine", "Mine", "Mine", 3)
    assert (task.hub, task.subset) == (None, None)  # not RTE's own examples
    assert (task.columns, task.metrics, task.seeds) == (("sentence1", "sentence2"), ("accuracy",), GLUE["rte"].seeds)


def test_given_files_or_dataset_take_precedence_over_the_folder_of_like():
    (task,) = select(["mine"], {"mine": {"like": "rte", "files": OWN["files"]}}, 7)
    assert (task.folder, task.title) == (None, "mine")
    (task,) = select(["mine"], {"mine": {"like": "rte", "hub": "org/name"}}, 7)
    assert (task.folder, task.hub, task.subset) == (None, "org/name", None)
    (task,) = select(["rte"], {"rte": {"hub": "org/glue"}}, 7)  # GLUE, as somebody else keeps it
    assert (task.folder, task.hub, task.subset) == (None, "org/glue", "rte")
    (task,) = select(["wnli"], {"wnli": {"like": "rte", "subset": "wnli"}}, 7)
    assert (task.folder, task.hub, task.subset) == (None, "nyu-mll/glue", "wnli")
    (task,) = select(["wnli"], {"wnli": {"like": "rte", "subset": "wnli", "folder": "WNLI"}}, 7)
    assert (task.folder, task.hub, task.subset) == ("WNLI", "nyu-mll/glue", "wnli")


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"lr": 1e-4}, True),
        ({"hub": "nyu-mll/glue"}, True),
        ({"folder": "RTE"}, True),
        ({"hub": "org/glue"}, False),
        ({"subset": "wnli"}, False),
        ({"folder": "Mine"}, False),
        ({"train": "validation"}, False),
        ({"validation": ["test"]}, False),
        ({"tsv_validation": ["test"]}, False),
        ({"files": OWN["files"]}, False),
        ({"metrics": ["macro_f1"]}, False),
    ],
)
def test_the_glue_average_counts_only_glue_data(given, counts):
    (task,) = select(["rte"], {"rte": given}, 7)
    assert of_glue(task) == counts


def test_malformed_rows_may_be_skipped_in_official_files_only():
    tasks = select(
        ["qqp", "same", "mine"], {"same": {"like": "qqp"}, "mine": {"like": "qqp", "files": OWN["files"]}}, 7
    )
    assert [task.malformed_rows for task in tasks] == [100, 100, 0]


def test_a_number_is_read_as_text():
    (task,) = select(
        ["mine"],
        {"mine": {**OWN, "title": 2020, "columns": [0], "labels": [0, 1.0, 1.5, "b"], "eval_interval": "500ba"}},
        7,
    )
    assert (task.title, task.columns, task.labels, task.eval_interval) == (
        "2020",
        (0,),
        ("0", "1", "1.5", "b"),
        "500ba",
    )


def test_a_new_task_needs_only_columns_and_a_location():
    (task,) = select(["mine"], {"mine": OWN}, 7)
    assert (task.title, task.metrics, task.kind, task.label, task.seeds) == (
        "mine",
        ("accuracy",),
        "classification",
        "label",
        (7,),
    )
    (task,) = select(["mine"], {"mine": {**OWN, "kind": "regression"}}, 7)
    assert (task.metrics, task.num_labels) == (("spearman",), 1)


def test_lists_of_hyperparameters_are_searched_in_all_combinations():
    tasks = select(["rte"], {"rte": {"lr": [1e-5, 3e-5], "epochs": [2, 3], "batch_size": 8}}, 7)
    assert [(task.lr, task.epochs, task.batch_size) for task in tasks] == [
        (1e-5, 2, 8),
        (1e-5, 3, 8),
        (3e-5, 2, 8),
        (3e-5, 3, 8),
    ]
    assert [task.variant for task in tasks][1] == "lr=1e-05,epochs=3"
    assert {task.name for task in tasks} == {"rte"}
    (task,) = select(["rte"], {"rte": {"lr": [3e-5]}}, 7)  # one value is no search
    assert (task.lr, task.variant) == (3e-5, "")


@pytest.mark.parametrize(
    ("to_run", "changes", "words"),
    [
        (["sst"], {}, ["tasks_to_run", "unknown task sst", "did you mean"]),
        (["zzz"], {}, ["unknown task zzz", "choose from", "mnli"]),
        (["rte", "rte"], {}, ["tasks_to_run", "rte more than once"]),
        ([], {"mine": OWN}, ["tasks_to_run is empty", "and not mine", "tasks_to_run=[mine]"]),
        ([], {"mine": {**OWN, "label": "text"}}, ["tasks.mine", "columns text and label text name a column twice"]),
        ([], {"mine": {**OWN, "columns": ["a", "a"]}}, ["tasks.mine", "a column twice"]),
        ([], {"cola": {"tsv_columns": [1]}}, ["tasks.cola", "a column twice"]),
        ([], {"mine": {**OWN, "hub": "org/name"}}, ["tasks.mine has both files and hub"]),
        ([], {"rte": {"files": OWN["files"], "folder": "RTE"}}, ["tasks.rte has both files and folder"]),
        ([], {"rte": {"learning_rate": 1}}, ["unknown key tasks.rte.learning_rate"]),
        ([], {"rte": {"epoch": 1}}, ["unknown key tasks.rte.epoch", "did you mean epochs?"]),
        ([], {"rte": {"name": "other"}}, ["tasks.rte.name"]),
        ([], {"rte": {"variant": "x"}}, ["tasks.rte.variant"]),
        ([], {"rte": {"metrics": ["acuracy"]}}, ["tasks.rte.metrics", "acuracy", "did you mean accuracy?"]),
        ([], {"rte": {"metrics": []}}, ["tasks.rte.metrics", "at least one"]),
        ([], {"rte": {"metrics": ["spearman"]}}, ["tasks.rte.metrics", "spearman", "classification"]),
        ([], {"stsb": {"metrics": ["accuracy"]}}, ["tasks.stsb.metrics", "accuracy", "regression"]),
        ([], {"mnli": {"metrics": ["f1"]}}, ["tasks.mnli.metrics", "two classes", "macro_f1"]),
        ([], {"rte": {"metrics": "accuracy"}}, ["tasks.rte.metrics"]),
        ([], {"mine": {"like": "rt"}}, ["tasks.mine.like", "rt", "did you mean rte?"]),
        ([], {"mine": {"lr": 1.0}}, ["tasks.mine", "columns", "like"]),
        ([], {"mine": {"columns": ["a"]}}, ["tasks.mine", "files", "hub", "folder"]),
        ([], {"mine": {**OWN, "columns": ["a", "b", "c"]}}, ["tasks.mine.columns", "one or two", "not 3"]),
        ([], {"mine": {**OWN, "files": {"train": "a.csv"}}}, ["tasks.mine.files lacks validation"]),
        ([], {"mine": {**OWN, "files": {"tain": "a.csv"}}}, ["unknown key tasks.mine.files.tain", "did you mean train?"]),
        ([], {"mine": {**OWN, "kind": "clustering"}}, ["tasks.mine.kind=clustering", "classification, regression"]),
        ([], {"mine": {**OWN, "labels": ["a"]}}, ["tasks.mine.labels", "two or more"]),
        ([], {"my task": OWN}, ["tasks.my task", "letters, digits"]),
        ([], {"rte": 5}, ["tasks.rte"]),
        ([], {"rte": {"optimizer": ["adamw", "decoupled_adamw"]}}, ["tasks.rte.optimizer", "only epochs, batch_size, lr"]),
        ([], {"mine": {"kind": ["regression"], **OWN}}, ["tasks.mine.kind=['regression'] must be a string"]),
        ([], {"mine": {"like": ["rte"]}}, ["tasks.mine.like=['rte'] must be a string"]),
        ([], {"rte": {"optimizer": None}}, ["tasks.rte.optimizer=None must be a string"]),
        ([], {"rte": {"metrics": [["accuracy"]]}}, ["tasks.rte.metrics=['accuracy'] must be a string"]),
        ([], {"rte": {"labels": [False, True]}}, ["tasks.rte.labels=False must be a string; put it in quotes"]),
        ([], {"rte": {"validation": []}}, ["tasks.rte.validation", "at least one"]),
        ([], {"rte": {"malformed_rows": "many"}}, ["tasks.rte.malformed_rows", "an integer ≥ 0"]),
        ([], {"rte": {"tsv_other_names": "train"}}, ["tasks.rte.tsv_other_names", "key: value"]),
        ([], {"mine": {**OWN, "columns": [-5]}}, ["tasks.mine: column=-5 must be an integer ≥ 0"]),
        ([], {"mine": {**OWN, "label": -1}}, ["tasks.mine: column=-1 must be an integer ≥ 0"]),
        ([], {"mine": {**OWN, "files": "a.csv"}}, ["tasks.mine.files", "key: value", "'a.csv'"]),
        ([], {"mine": {**OWN, "files": {"train": None, "validation": "b.csv"}}}, ["tasks.mine.files.train", "a path", "None"]),
        ([], {"mine": {**OWN, "files": {"train": "a.csv", "validation": 5}}}, ["tasks.mine.files.validation", "a path", "5"]),
        ([], {"mine": {**OWN, "files": {"train": [], "validation": "b.csv"}}}, ["tasks.mine.files.train", "a path"]),
        ([], {"rte": {"seeds": 19}}, ["tasks.rte.seeds"]),
        ([], {"rte": {"seeds": [1, 1]}}, ["tasks.rte.seeds", "twice"]),
        ([], {"rte": {"seeds": [-1]}}, ["tasks.rte.seeds", "-1"]),
        ([], {"rte": {"lr": "fast"}}, ["tasks.rte.lr='fast' must be a number ≥ 0"]),
        ([], {"rte": {"epochs": 1.5}}, ["tasks.rte.epochs=1.5 must be an integer ≥ 1"]),
        ([], {"rte": {"epochs": 2.0}}, ["tasks.rte.epochs=2.0 must be an integer ≥ 1"]),
        ([], {"rte": {"batch_size": [8, 0]}}, ["tasks.rte.batch_size=0 must be an integer ≥ 1"]),
        ([], {"rte": {"lr": []}}, ["tasks.rte", "a search needs values"]),
        ([], {"rte": {"lr": [0.1, 0.1]}}, ["tasks.rte", "each once"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_tasks_is_named(to_run, changes, words):
    with pytest.raises(UserError) as error:
        select(to_run, changes, 7)
    for word in words:
        assert word in str(error.value)

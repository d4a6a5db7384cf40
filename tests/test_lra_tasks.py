"""Tasks of Long Range Arena: their sizes, what a config changes in them, and which results the average counts."""

from dataclasses import replace

import pytest

from src.errors import UserError
from src.lra.experiment import LraExperiment
from src.lra.tasks import LRA, SUITE, TESTED, counts, model_arguments, unlike


def select(changes: dict, *to_run: str) -> list:
    return SUITE.select([*to_run], changes, 1)


@pytest.mark.parametrize(
    ("name", "length", "classes", "inputs", "layers", "width", "epochs", "batch_size", "weight_decay", "dropout"),
    [
        ("listops", 2000, 10, "tokens", 8, 128, 40, 50, 0.04, 0.0),
        ("text", 4096, 2, "tokens", 6, 256, 35, 50, 0.07, 0.1),
        ("retrieval", 4000, 2, "tokens", 6, 128, 20, 32, 0.05, 0.0),
        ("image", 1024, 10, "values", 6, 512, 250, 50, 0.07, 0.1),
        ("pathfinder", 1024, 2, "values", 6, 192, 200, 64, 0.03, 0.05),
        ("pathx", 16384, 2, "values", 6, 128, 75, 32, 0.06, 0.0),
    ],
)
def test_the_six_have_the_sizes_of_s5(
    name, length, classes, inputs, layers, width, epochs, batch_size, weight_decay, dropout
):
    task = LRA[name]
    assert (task.max_length, task.num_labels, task.inputs) == (length, classes, inputs)
    assert (task.model["num_hidden_layers"], task.model["hidden_size"]) == (layers, width)
    assert (task.epochs, task.batch_size, task.weight_decay, task.dropout) == (
        epochs,
        batch_size,
        weight_decay,
        dropout,
    )
    assert task.metrics == ("accuracy",) and task.optimizer == "adamw" and task.lr == 5e-4
    assert task.pairs == (name == "retrieval")


def test_all_six_run_by_default_and_the_second_average_is_without_pathx():
    assert [task.name for task in select({})] == [*LRA] == "listops text retrieval image pathfinder pathx".split()
    six, five = LraExperiment.averages
    assert six.tasks.keys() - five.tasks.keys() == {"pathx"} and len(five.tasks) == 5


@pytest.mark.parametrize(
    ("changes", "origin", "counted"),
    [
        ({}, None, True),
        ({}, "the Hub's stanfordnlp/imdb", True),
        ({}, "generated, seed 3", True),
        ({}, "generated, seed 0, unlike the release (rows 64 24 24)", False),
        ({"lr": 1e-3, "epochs": 2, "dropout": 0.3, "model": {"hidden_size": 16}, "validation": "test"}, None, True),
        ({"max_length": 100}, None, False),
        ({"labels": [*"9876543210"]}, None, False),
        ({"metrics": ["macro_f1"]}, None, False),
        ({"layout": "imdb", "vocabulary": 256}, None, False),
    ],
)
def test_the_average_counts_a_task_with_its_data_and_measure(changes, origin, counted):
    (task,) = select({"listops": changes}, "listops")
    assert counts(task, origin, TESTED["listops"]) is counted
    assert not counts(task, origin, 4)


def test_what_is_unlike_the_benchmark_is_named():
    (task,) = select({"text": {"max_length": 512, "labels": ["no", "yes"]}}, "text")
    assert unlike(LRA["text"], 25_000) == [] and unlike(replace(task, name="mine"), 25_000) is None
    expected = ["max_length, labels unlike the benchmark's", "40 test examples instead of 25,000"]
    assert unlike(task, 40) == expected


def test_a_task_of_ones_own_is_like_another_and_is_not_counted():
    (task,) = select({"short": {"like": "listops", "max_length": 100, "title": "Short"}}, "short")
    assert task == replace(LRA["listops"], name="short", title="Short", max_length=100, seeds=(1,))
    assert not counts(task, None, TESTED["listops"])


def test_changed_arguments_of_a_model_keep_the_others():
    (task,) = select({"text": {"model": {"hidden_size": 64}}}, "text")
    assert task.model == {**LRA["text"].model, "hidden_size": 64}
    assert model_arguments(task, task.model, {"hidden_size": 32, "mixer": "lion-d"}) == {
        **LRA["text"].model, "hidden_size": 32, "mixer": "lion-d"
    }  # fmt: skip
    (task,) = select({"bytes": {"like": "text", "model": {"num_hidden_layers": 2}}}, "bytes")
    assert task.model["num_hidden_layers"] == 2 and task.model["hidden_size"] == 256


def test_long_reach_is_the_length_of_the_task():
    (task,) = select({"text": {"model": {"long_reach": 7}}}, "text")
    assert model_arguments(LRA["pathx"], {}, {"long_reach": True})["long_reach"] == 16384
    assert model_arguments(task, task.model, {})["long_reach"] == 7
    assert model_arguments(task, task.model, {"long_reach": 500})["long_reach"] == 500
    assert "long_reach" not in model_arguments(task, task.model, {"long_reach": False})


def test_lists_of_lr_and_dropout_are_a_search():
    found = select({"listops": {"lr": [1e-3, 3e-3], "dropout": [0.0, 0.1]}}, "listops")
    assert [(task.lr, task.dropout) for task in found] == [(1e-3, 0.0), (1e-3, 0.1), (3e-3, 0.0), (3e-3, 0.1)]
    assert len({task.variant for task in found}) == 4 and all("dropout=" in task.variant for task in found)


def test_results_depend_on_training_and_model_but_not_on_memory_or_where_files_are():
    same = {"folder": "elsewhere", "microbatch_size": 2, "split_seed": 3, "seeds": [4], "title": "Lists"}
    for changes, equal in (({"listops": same}, True), ({"listops": {"dropout": 0.1}}, False)):
        (task,) = select(changes, "listops")
        assert (task.settings() == LRA["listops"].settings()) is equal


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("listops", {"size": 32}, "tasks.listops.size=32: use 32 or 128 for Pathfinder"),
        ("mine", {"like": "pathfinder", "size": None}, "tasks.mine.size=None: use 32 or 128 for Pathfinder"),
        ("pathx", {"size": 64}, "tasks.pathx.size=64 must be one of"),
        ("listops", {"vocabulary": 14}, "tasks.listops.vocabulary=14: its inputs have 15 values"),
        ("text", {"vocabulary": 128}, "tasks.text.vocabulary=128: its inputs have 256 values"),
        ("text", {"microbatch_size": 51}, "tasks.text.microbatch_size=51 is more than batch_size=50; lower it"),
        ("text", {"batch_size": 8, "microbatch_size": 0}, "tasks.text.microbatch_size=0"),
        ("text", {"vocabulary": 257}, "tasks.text.vocabulary=257"),
        ("text", {"validation": "none"}, "tasks.text.validation"),
        ("text", {"labels": []}, "tasks.text.labels is empty; name the classes"),
        ("text", {"metrics": ["spearman"]}, "tasks.text.metrics: unknown metric spearman"),
        ("text", {"max_len": 5}, "unknown key tasks.text.max_len; did you mean max_length?"),
        ("mine", {"like": "listop"}, "tasks.mine.like: unknown task listop; did you mean listops?"),
        ("mine", {"layout": "listops"}, "tasks.mine"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_task_is_one_sentence(name, given, message):
    with pytest.raises(UserError) as error:
        select({name: given}, name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_argument_of_a_model_is_named():
    (task,) = select({"text": {"model": {"hiden_size": 64}}}, "text")
    with pytest.raises(UserError, match=r"tasks\.text\.model\.hiden_size; did you mean hidden_size"):
        model_arguments(task, task.model, {})

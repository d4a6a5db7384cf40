"""One config from a YAML file, the file it inherits, and the command line; every mistake in one sentence."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from conftest import ROOT
from omegaconf import OmegaConf

from src.config import describe, load, to_dict
from src.errors import UserError
from src.glue.config import FinetuneConfig
from src.mlm.config import PretrainConfig

YAMLS = sorted((ROOT / "yamls").rglob("*.yaml"))
NAMED = [path for path in YAMLS if {"run_name", "base_run_name"} & OmegaConf.load(path).keys()]
PRETRAIN = [path for path in NAMED if "run_name" in OmegaConf.load(path)]


def pretrain(*argv: object) -> PretrainConfig:
    return load(PretrainConfig, "main.py", [str(argument) for argument in argv])


def finetune(*argv: object) -> FinetuneConfig:
    return load(FinetuneConfig, "glue.py", [str(argument) for argument in argv])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def keys(schema: type, prefix: str = ""):
    for entry in fields(schema):
        kind = get_type_hints(schema)[entry.name]
        if is_dataclass(kind):
            yield from keys(kind, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


# The project's own files


@pytest.mark.parametrize("path", NAMED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_yaml_with_a_name_loads(path):
    config = (pretrain if path in PRETRAIN else finetune)(path)
    name = config.run_name if path in PRETRAIN else config.base_run_name
    assert config.save_folder == f"./runs/{name}"
    assert config.scheduler["name"] == "linear_decay_with_warmup"


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_the_model_of_every_pretraining_yaml_can_be_built(path, tokenizer):
    from src.training.registry import build_lion_config, build_scheduler

    config = pretrain(path)
    model = build_lion_config(config.model, tokenizer, config.max_seq_len)
    family = path.stem.split("-")
    assert model.mixer == ("softmax" if family[0] == "bert" else "-".join(family[:2]))
    assert model.vocab_size % 8 == 0
    assert model.vocab_size >= len(tokenizer)
    build_scheduler(config.scheduler)


def test_there_is_a_base_and_a_tiny_yaml_for_each_mixer():
    names = {path.stem for path in PRETRAIN}
    assert {f"{model}-{size}" for model in ("lion-lit", "lion-d", "lion-s", "bert") for size in ("base", "tiny")} <= names  # fmt: skip


# Inheritance, overrides, interpolation


def test_a_file_states_only_what_differs_from_the_one_it_inherits(tmp_path, config_file):
    child = write(tmp_path / "child.yaml", "inherit: tiny.yaml\nrun_name: child\nmodel: {mixer: lion-d}\noptimizer: {lr: 0.5}\n")  # fmt: skip
    base, config = pretrain(config_file), pretrain(child)
    assert (config.run_name, config.model["mixer"], config.optimizer["lr"]) == ("child", "lion-d", 0.5)
    assert config.model == {**base.model, "mixer": "lion-d"}
    assert config.optimizer == {**base.optimizer, "lr": 0.5}
    changed = {name for name, value in to_dict(config).items() if value != to_dict(base)[name]}
    assert changed == {"run_name", "model", "optimizer"}


def test_inherit_is_relative_to_the_file_that_says_it(tmp_path, config_file, monkeypatch):
    (tmp_path / "deep").mkdir()
    child = write(tmp_path / "deep" / "child.yaml", "inherit: ../tiny.yaml\nseed: 99\n")
    monkeypatch.chdir("/")
    assert pretrain(child).seed == 99


def test_overrides_win_over_the_file_and_keep_what_stands_beside_them(config_file):
    config = pretrain(config_file, "optimizer.lr=0.25", "model.mixer=softmax", "seed=3", "load_path=null", "train_loader.num_workers=2")  # fmt: skip
    assert config.optimizer["lr"] == 0.25
    assert config.optimizer["name"] == "decoupled_adamw"
    assert config.model["mixer"] == "softmax"
    assert config.model["hidden_size"] == 32
    assert (config.seed, config.load_path, config.train_loader.num_workers) == (3, None, 2)


def test_keys_shared_by_the_loaders_are_given_once(config_file):
    config = pretrain(config_file, "data_local=/elsewhere", "max_seq_len=40", "seed=5", "run_name=other", "save_folder=runs/${run_name}")  # fmt: skip
    for loader in (config.train_loader, config.eval_loader):
        assert (loader.dataset.local, loader.dataset.max_seq_len, loader.dataset.seed) == ("/elsewhere", 40, 5)
        assert loader.dataset.tokenizer_name == config.tokenizer_name
    assert config.train_loader.dataset.mlm_probability == config.mlm_probability == 0.3
    assert config.eval_loader.dataset.mlm_probability == 0.15
    assert config.save_folder == "runs/other"
    assert config.loggers["tensorboard"]["log_dir"] == "runs/other/tensorboard"


def test_values_get_the_type_of_their_key(config_file):
    config = pretrain(config_file, "mlm_probability=1", "save_interval=5ba", "device_train_microbatch_size=auto", "eval_first=no")  # fmt: skip
    assert isinstance(config.mlm_probability, float)
    assert config.save_interval == "5ba"
    assert config.device_train_microbatch_size == "auto"
    assert config.eval_first is False


def test_a_path_may_begin_with_the_users_folder(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    streams = "train_loader.dataset.streams={web: {local: ~/web}}"
    config = pretrain(config_file, "save_folder=~/runs/${run_name}", "data_local=~/c4", streams)
    assert config.save_folder == "/home/me/runs/tiny"
    assert config.train_loader.dataset.local == "/home/me/c4"
    assert config.train_loader.dataset.streams["web"]["local"] == "/home/me/web"


def test_lists_are_given_in_brackets(tmp_path):
    path = write(tmp_path / "f.yaml", f"inherit: {ROOT}/yamls/finetune-glue/recipe.yaml\nbase_run_name: x\n")
    config = finetune(path, "tasks_to_run=[sst2,rte]", "tasks.rte.seeds=[1,2]")
    assert config.tasks_to_run == ["sst2", "rte"]
    assert config.tasks == {"rte": {"seeds": [1, 2]}}


def test_to_dict_is_plain_and_loads_back(tmp_path, config_file):
    config = pretrain(config_file)
    path = write(tmp_path / "again.yaml", yaml.safe_dump(to_dict(config)))
    assert pretrain(path) == config


def test_streams_are_plain_dictionaries_with_what_they_refer_to(config_file):
    overrides = ["train_loader.dataset.streams.web.local=${data_local}/web", "train_loader.dataset.streams.web.proportion=0.5"]  # fmt: skip
    config = pretrain(config_file, "data_local=/elsewhere", *overrides)
    assert config.train_loader.dataset.streams == {"web": {"local": "/elsewhere/web", "proportion": 0.5}}
    assert type(config.train_loader.dataset.streams["web"]) is dict
    assert config.eval_loader.dataset.streams == {}


# --help and --print_config


@pytest.mark.parametrize(
    ("schema", "read"), [(PretrainConfig, pretrain), (FinetuneConfig, finetune)], ids=["main.py", "glue.py"]
)
def test_help_lists_every_key_with_its_meaning(schema, read, capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for name in keys(schema):
        at = [i for i, line in enumerate(lines) if line.split(" = ")[0] == f"  {name}"]
        assert len(at) == 1, name
        assert len(lines[at[0] + 1].strip()) > 5, name
    assert describe(schema) in text
    for name in (
        "hidden_size=768",
        "clipping_threshold",
        "window_size=",
        "filter_bias_norm_wd=False",
        "t_warmup",
        "sharding_strategy='FULL_SHARD'",
        "backend='inductor'",
    ):
        assert name in text, name


def test_print_config_prints_yaml_that_loads_back_to_the_same_config(tmp_path, config_file, capsys):
    with pytest.raises(SystemExit) as stop:
        pretrain(config_file, "seed=41", "--print_config")
    assert stop.value.code == 0
    printed = write(tmp_path / "printed.yaml", capsys.readouterr().out)
    assert "${" not in printed.read_text()
    assert pretrain(printed) == pretrain(config_file, "seed=41")


# Mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_duratoin=3ba", ["unknown key max_duratoin", "did you mean max_duration?"]),
        ("lr=1", ["unknown key lr", "did you mean optimizer.lr?"]),
        ("hidden_size=64", ["unknown key hidden_size", "did you mean model.hidden_size?"]),
        ("train_loader.num_worker=1", ["train_loader.num_worker", "did you mean train_loader.num_workers?"]),
        ("train_loader.dataset.splt=val", ["train_loader.dataset.splt", "did you mean train_loader.dataset.split?"]),
        ("save_foldr=x", ["did you mean save_folder?"]),
        ("qqqq=1", ["unknown key qqqq", "--help lists the keys"]),
        ("seed=many", ["seed", "many"]),
        ("seed=1.5", ["seed", "1.5"]),
        ("eval_first=perhaps", ["eval_first", "perhaps"]),
        ("mlm_probability=[1]", ["mlm_probability"]),
        ("model=7", ["model"]),
        ("train_loader=7", ["train_loader"]),
        ("max_duration=null", ["max_duration"]),
        ("save_folder=${no_such_key}", ["no_such_key"]),
        ("train_loader=${no_such_key}", ["no_such_key"]),
        ("save_folder=./{run_name}/run", ["save_folder", "./{run_name}/run", "${run_name}"]),
        ("load_path=ep{epoch}.pt", ["load_path", "ep{epoch}.pt"]),
        ("seed", ["'seed'", "key=value"]),
        ("seed={", ["seed={"]),
    ],
)
def test_a_mistake_in_an_override_is_named(config_file, override, words):
    with pytest.raises(UserError) as error:
        pretrain(config_file, override)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 3\n", ["f.yaml", "run_name", "max_duration", "unset"]),
        ("inherit: nowhere.yaml\n", ["nowhere.yaml", "not a file"]),
        ("inherit: f.yaml\n", ["f.yaml", "inherits itself"]),
        ("inherit: [a.yaml]\n", ["f.yaml", "inherit"]),
        ("inherit: ${base}\n", ["f.yaml", "base"]),
        ("train_loader: ???\n", ["f.yaml", "train_loader"]),
        ("seed: [1\nrun_name: x\n", ["f.yaml", "not valid YAML"]),
        ("- a\n- b\n", ["f.yaml", "key: value"]),
        ("hello\n", ["hello"]),
        ("3\n", ["f.yaml", "int"]),
        ("max_duratoin: 3ba\n", ["unknown key max_duratoin", "max_duration"]),
        ("train_loader: {datset: {split: train}}\n", ["train_loader.datset"]),
        ("seed: 1\nseed: 2\n", ["f.yaml", "seed"]),
        ("", ["f.yaml"]),
        (f"inherit: {ROOT}/yamls/pretrain/recipe.yaml\n", ["f.yaml leaves", "run_name unset", "run_name=VALUE"]),
    ],
    ids=["missing values", "base absent", "own base", "base no name", "base unknown", "no section", "malformed", "list", "text", "number", "misspelt", "misspelt section", "twice", "empty", "recipe without a name"],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        pretrain(write(tmp_path / "f.yaml", text))
    for word in words:
        assert word in str(error.value)


def test_a_cycle_of_files_is_named(tmp_path):
    write(tmp_path / "a.yaml", "inherit: b.yaml\n")
    with pytest.raises(UserError, match="inherits itself"):
        pretrain(write(tmp_path / "b.yaml", "inherit: a.yaml\n"))


@pytest.mark.parametrize("name", ["nowhere.yaml", "."], ids=["absent", "folder"])
def test_what_is_no_file_is_named(tmp_path, name):
    with pytest.raises(UserError, match="not a file"):
        pretrain(tmp_path / name)


@pytest.mark.parametrize("name", ["/proc/self/mem", f"{'long' * 99}.yaml"])  # whose first bytes none can read; too long
def test_what_cannot_be_read_is_named(name):
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        pretrain(name)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"seed: \xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml is not valid YAML"):
        pretrain(path)


def test_no_file_at_all_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        pretrain()
    assert stop.value.code == 2
    assert "FILE.yaml" in capsys.readouterr().err

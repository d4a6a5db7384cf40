"""One config from a YAML file, the file it inherits and the command line; every mistake is reported in one sentence."""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from conftest import ROOT
from omegaconf import OmegaConf

import embed as embed_command
import main
from src.config import TIME_UNITS, Rule, check_value, describe, fixed_settings, key, to_dict
from src.embed.config import EmbedConfig
from src.errors import UserError
from src.glue.experiment import FinetuneConfig
from src.mlm.task import PretrainConfig
from src.training.config import load_config

YAMLS = sorted(
    path for path in (ROOT / "yamls").rglob("*.yaml") if not {"vision", "lra"} & set(path.relative_to(ROOT).parts)
)
NAMED = [path for path in YAMLS if {"run_name", "base_run_name"} & OmegaConf.load(path).keys()]
EMBED = [path for path in NAMED if path.parent.name == "embed"]
PRETRAIN = [path for path in NAMED if path not in EMBED and "run_name" in OmegaConf.load(path)]


def pretrain(*argv: object) -> PretrainConfig:
    return load_config(PretrainConfig, "main.py", "", [str(argument) for argument in argv])


def finetune(*argv: object) -> FinetuneConfig:
    return load_config(FinetuneConfig, "glue.py", "", [str(argument) for argument in argv])


def embed(*argv: object) -> EmbedConfig:
    return load_config(EmbedConfig, "embed.py", "", [*map(str, argv), "data.pairs.files=pairs.jsonl"])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def names_of_keys(schema: type, prefix: str = ""):
    for entry in fields(schema):
        kind = get_type_hints(schema)[entry.name]
        if is_dataclass(kind):
            yield from names_of_keys(kind, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


# The project's own files


@pytest.mark.parametrize("path", NAMED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_named_yaml_loads(path):
    config = (embed if path in EMBED else pretrain if path in PRETRAIN else finetune)(path)
    name = config.base_run_name if isinstance(config, FinetuneConfig) else config.run_name
    assert config.save_folder == f"./runs/{name}"
    assert config.scheduler["name"] == "linear_decay_with_warmup"


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_the_model_of_every_pretraining_yaml_can_be_built(path, tokenizer):
    from src.training.registry import build_scheduler
    from src.training.text_model import build_lion_config

    config = pretrain(path)
    config.model.pop("pretrained_checkpoint", None)  # which the command reads before it builds the model
    model = build_lion_config(config.model, tokenizer, config.max_seq_len)
    family = path.stem.split("-")
    own = {"bert": "softmax", "modern": "softmax", "hydra": "hydra"}
    assert model.mixer == own.get(family[0], "-".join(family[:2]))
    assert model.vocab_size % 8 == 0
    assert model.vocab_size >= len(tokenizer)
    build_scheduler(config.scheduler)


def test_each_mixer_has_a_base_and_a_tiny_yaml():
    names = {path.stem for path in PRETRAIN}
    assert {
        f"{model}-{size}" for model in ("lion-lit", "lion-d", "lion-s", "hydra", "bert") for size in ("base", "tiny")
    } <= names


# Inheritance, overrides, interpolation


def test_a_file_states_only_what_differs_from_the_one_it_inherits(tmp_path, config_file):
    child = write(
        tmp_path / "child.yaml", "inherit: tiny.yaml\nrun_name: child\nmodel: {mixer: lion-d}\noptimizer: {lr: 0.5}\n"
    )
    base, config = pretrain(config_file), pretrain(child)
    assert (config.run_name, config.model["mixer"], config.optimizer["lr"]) == ("child", "lion-d", 0.5)
    assert config.model == {**base.model, "mixer": "lion-d"}
    assert config.optimizer == {**base.optimizer, "lr": 0.5}
    changed = {name for name, value in to_dict(config).items() if value != to_dict(base)[name]}
    assert changed == {"run_name", "model", "optimizer"}


def test_inherit_is_relative_to_the_file_that_contains_it(tmp_path, config_file, monkeypatch):
    (tmp_path / "deep").mkdir()
    child = write(tmp_path / "deep" / "child.yaml", "inherit: ../tiny.yaml\nseed: 99\n")
    monkeypatch.chdir("/")
    assert pretrain(child).seed == 99


def test_overrides_replace_single_keys_of_the_file(config_file):
    config = pretrain(
        config_file,
        "optimizer.lr=0.25",
        "model.mixer=softmax",
        "seed=3",
        "load_path=null",
        "train_loader.num_workers=2",
    )
    assert config.optimizer["lr"] == 0.25
    assert config.optimizer["name"] == "decoupled_adamw"
    assert config.model["mixer"] == "softmax"
    assert config.model["hidden_size"] == 32
    assert (config.seed, config.load_path, config.train_loader.num_workers) == (3, None, 2)


def test_keys_shared_by_the_loaders_are_given_once(config_file):
    config = pretrain(
        config_file,
        "data_local=/elsewhere",
        "max_seq_len=40",
        "seed=5",
        "run_name=other",
        "save_folder=runs/${run_name}",
    )
    for loader in (config.train_loader, config.eval_loader):
        assert (loader.dataset.local, loader.dataset.max_seq_len, loader.dataset.seed) == ("/elsewhere", 40, 5)
        assert loader.dataset.tokenizer_name == config.tokenizer_name
    assert config.train_loader.dataset.mlm_probability == config.mlm_probability == 0.3
    assert config.eval_loader.dataset.mlm_probability == 0.15
    assert config.save_folder == "runs/other"
    assert config.loggers["tensorboard"]["log_dir"] == "runs/other/tensorboard"


def test_values_get_the_type_of_their_key(config_file):
    config = pretrain(
        config_file, "dist_timeout=60", "save_interval=5ba", "device_train_microbatch_size=auto", "eval_first=no"
    )
    assert isinstance(config.dist_timeout, float)
    assert config.save_interval == "5ba"
    assert config.device_train_microbatch_size == "auto"
    assert config.eval_first is False


def test_a_path_may_start_with_the_home_folder(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    streams = "train_loader.dataset.streams={web: {local: ~/web}}"
    config = pretrain(config_file, "save_folder=~/runs/${run_name}", "data_local=~/c4", streams)
    assert config.save_folder == "/home/me/runs/tiny"
    assert config.train_loader.dataset.local == "/home/me/c4"
    assert config.train_loader.dataset.streams["web"]["local"] == "/home/me/web"


def test_a_list_is_written_in_brackets(tmp_path):
    path = write(tmp_path / "f.yaml", f"inherit: {ROOT}/yamls/finetune-glue/recipe.yaml\nbase_run_name: x\n")
    config = finetune(path, "tasks_to_run=[sst2,rte]", "tasks.rte.seeds=[1,2]")
    assert config.tasks_to_run == ["sst2", "rte"]
    assert config.tasks == {"rte": {"seeds": [1, 2]}}


def test_to_dict_is_plain_and_loads_back(tmp_path, config_file):
    config = pretrain(config_file)
    path = write(tmp_path / "again.yaml", yaml.safe_dump(to_dict(config)))
    assert pretrain(path) == config


def test_streams_are_plain_dictionaries_with_their_references_resolved(config_file):
    overrides = [
        "train_loader.dataset.streams.web.local=${data_local}/web",
        "train_loader.dataset.streams.web.proportion=0.5",
    ]
    config = pretrain(config_file, "data_local=/elsewhere", *overrides)
    assert config.train_loader.dataset.streams == {"web": {"local": "/elsewhere/web", "proportion": 0.5}}
    assert type(config.train_loader.dataset.streams["web"]) is dict
    assert config.eval_loader.dataset.streams == {}


# --help and --print_config
def test_a_mistyped_command_is_named_and_the_others_are_in_the_help(capsys):
    for word, fix in (("encod", "did you mean encode"), ("train", "choose from encode, evaluate")):
        with pytest.raises(UserError, match=f"^{word} is neither a YAML file nor a command of embed.py; {fix}"):
            embed_command.main([word, "my-model", "--data_files", "x.jsonl"])
    with pytest.raises(SystemExit):
        main.main(["--help"])
    printed = capsys.readouterr().out
    assert "Other commands, each with a --help of its own: main.py context" in printed
    assert "key_weight='none' (or linear, sqrt)" in printed


@pytest.mark.parametrize(
    ("schema", "read"), [(PretrainConfig, pretrain), (FinetuneConfig, finetune)], ids=["main.py", "glue.py"]
)
def test_help_lists_every_key_with_its_meaning(schema, read, capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for name in names_of_keys(schema):
        at = [i for i, line in enumerate(lines) if line.split(" = ")[0] == f"  {name}"]
        assert len(at) == 1, name
        assert len(lines[at[0] + 1].strip()) > 5, name
    assert describe(schema) in text
    arguments = {
        "model": "hidden_size=768", "algorithms": "clipping_threshold", "callbacks": "window_size=",
        "optimizer": "filter_bias_norm_wd=False", "scheduler": "t_warmup",
        "fsdp_config": "sharding_strategy='FULL_SHARD'", "compile_config": "backend='inductor'",
    }  # fmt: skip
    sections = {entry.name for entry in fields(schema)}
    assert {section for section, name in arguments.items() if name in text} == arguments.keys() & sections


@pytest.mark.parametrize("yaml_file", ["finetune-glue/lion-s-base", "lra/lion-s", "vision/cifar", "embed/tiny"])
def test_a_config_of_another_command_names_that(yaml_file, tmp_path):
    (own := tmp_path / "own.yaml").write_text(f"inherit: {ROOT}/yamls/{yaml_file}.yaml\n")
    with pytest.raises(UserError) as error:
        pretrain(str(own))
    command = {"finetune-glue": "glue.py", "lra": "lra.py", "vision": "vision.py", "embed": "embed.py"}
    of = command[yaml_file.split("/")[0]]
    assert str(error.value) == f"{own} is a config of {of}; run python {of} {own}"
    (own := tmp_path / "other.yaml").write_text(f"inherit: {ROOT}/yamls/lra/pretrain/listops.yaml\n")
    assert pretrain(str(own)).max_seq_len > 0


def test_help_shows_the_choices_of_a_key():
    text = describe(PretrainConfig)
    for name, choices in (
        ("precision", "(fp32, amp_bf16, amp_fp16)"),
        ("float32_matmul_precision", "(highest, high, medium)"),
        ("on_nonfinite_loss", "(stop, skip)"),
        ("hf_export", "(end, save)"),
    ):
        assert re.search(rf"^  {name} = .*\n.*{re.escape(choices)}$", text, re.MULTILINE), name


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
        ("save_folder=", ["save_folder: has no value; give one, or omit the key"]),
        ("seed=many", ["seed", "many"]),
        ("seed=1.5", ["seed", "1.5"]),
        ("eval_first=perhaps", ["eval_first", "perhaps"]),
        ("mlm_probability=[1]", ["mlm_probability"]),
        ("model=7", ["model"]),
        ("compile_config=max-autotune", ["compile_config=max-autotune must be auto, null or a section"]),
        ("train_loader=7", ["train_loader"]),
        ("max_duration=null", ["max_duration"]),
        ("save_folder=${no_such_key}", ["no_such_key"]),
        ("train_loader=${no_such_key}", ["no_such_key"]),
        ("save_folder=./{run_name}/run", ["save_folder", "./{run_name}/run", "${run_name}"]),
        ('save_folder=""', ["save_folder is empty; name a folder"]),
        ("load_path=ep{epoch}.pt", ["load_path", "ep{epoch}.pt"]),
        ("seed", ["'seed'", "key=value"]),
        ("seed={", ["seed={"]),
        ("resume_with=seed", ["resume_with: must be a list, such as resume_with=[one,two]"]),
    ],
)
def test_a_mistake_in_an_override_is_reported(config_file, override, words):
    with pytest.raises(UserError) as error:
        pretrain(config_file, override)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 3\n", ["f.yaml does not set", "run_name", "max_duration"]),
        ("inherit: nowhere.yaml\n", ["nowhere.yaml", "not a file"]),
        ("inherit: f.yaml\n", ["f.yaml", "inherits itself"]),
        ("inherit: [a.yaml]\n", ["f.yaml", "inherit"]),
        ("inherit: ${base}\n", ["f.yaml", "base"]),
        ("train_loader: ???\n", ["train_loader='???' must be a section"]),
        ("seed: [1\nrun_name: x\n", ["f.yaml", "not valid YAML"]),
        ("- a\n- b\n", ["f.yaml", "key: value"]),
        ("callbacks: [speed_monitor]\n", ["f.yaml: a list is where a section of `key: value` lines belongs"]),
        ("hello\n", ["hello"]),
        ("3\n", ["f.yaml", "int"]),
        ("max_duratoin: 3ba\n", ["unknown key max_duratoin", "max_duration"]),
        ("train_loader: {datset: {split: train}}\n", ["train_loader.datset"]),
        ("seed: 1\nseed: 2\n", ["f.yaml", "seed"]),
        ("", ["f.yaml"]),
        (f"inherit: {ROOT}/yamls/pretrain/recipe.yaml\n", ["f.yaml does not set run_name", "run_name=VALUE"]),
    ],
    ids=[
        "missing values",
        "base absent",
        "own base",
        "base no name",
        "base unknown",
        "no section",
        "malformed",
        "list",
        "list for a section",
        "text",
        "number",
        "misspelt",
        "misspelt section",
        "twice",
        "empty",
        "recipe without a name",
    ],
)
def test_a_mistake_in_a_file_is_reported(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        pretrain(write(tmp_path / "f.yaml", text))
    for word in words:
        assert word in str(error.value)


def test_a_cycle_of_inherited_files_is_reported(tmp_path):
    write(tmp_path / "a.yaml", "inherit: b.yaml\n")
    with pytest.raises(UserError, match="inherits itself"):
        pretrain(write(tmp_path / "b.yaml", "inherit: a.yaml\n"))


@pytest.mark.parametrize("name", ["nowhere.yaml", "."], ids=["absent", "folder"])
def test_a_missing_file_is_reported(tmp_path, name):
    with pytest.raises(UserError, match="not a file"):
        pretrain(tmp_path / name)


@pytest.mark.parametrize("name", ["/proc/self/mem", f"{'long' * 99}.yaml"])  # its first bytes cannot be read; too long
def test_an_unreadable_file_is_reported(name):
    with pytest.raises(UserError, match=f"cannot read {name}"):
        pretrain(name)


def test_bytes_that_are_not_text_are_reported(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"seed: \xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml is not valid YAML"):
        pretrain(path)


def test_a_command_without_a_file_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        pretrain()
    assert stop.value.code == 2
    assert "FILE.yaml" in capsys.readouterr().err


# Rules of keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("save_interval=0ba", "save_interval=0ba is not a duration > 0; give a number and ba (batches), "),
        ("save_interval=-5ba", "save_interval=-5ba is not a duration > 0"),
        ("eval_interval=500", "eval_interval=500 is not a duration > 0"),
        ("max_duration=soon", "max_duration=soon is not a duration > 0"),
        (
            "max_duration=0.5dur",
            "max_duration=0.5dur is not a duration > 0; "
            "give a number and ba (batches), sp (samples), ep (epochs), tok (tokens), such as 10ba",
        ),
        ("log_interval=1ep", "log_interval=1ep is not a duration > 0; give a number and ba (batches), such as 10ba"),
        ("seed=-1", "seed=-1 must be an integer ≥ 0 and ≤ 4294967295"),
        (
            "train_loader.dataset.seed=4294967296",
            "train_loader.dataset.seed=4294967296 must be an integer ≥ 0 and ≤ 4294967295",
        ),
        ("train_loader.num_workers=-1", "train_loader.num_workers=-1 must be an integer ≥ 0"),
        (
            "train_loader.dataset.mlm_probability=1",
            "train_loader.dataset.mlm_probability=1.0 must be a number > 0 and < 1",
        ),
        ("global_train_batch_size=0", "global_train_batch_size=0 must be an integer ≥ 1"),
        ("global_train_batch_size=-8", "global_train_batch_size=-8 must be an integer ≥ 1"),
        ("device_train_microbatch_size=0", "device_train_microbatch_size=0 must be an integer ≥ 1, or auto"),
        ("device_train_microbatch_size=1.5", "device_train_microbatch_size=1.5 must be an integer ≥ 1, or auto"),
        ("device_train_microbatch_size=many", "device_train_microbatch_size='many' must be an integer ≥ 1, or auto"),
        ("device_eval_batch_size=0", "device_eval_batch_size=0 must be an integer ≥ 1"),
        ("eval_subset_num_batches=0", "eval_subset_num_batches=0 must be an integer ≥ 1, or -1"),
        ("save_num_checkpoints_to_keep=0", "save_num_checkpoints_to_keep=0 must be an integer ≥ 1, or -1"),
        ("max_seq_len=2", "max_seq_len=2 must be an integer ≥ 3"),
        ("eval_loader.dataset.max_seq_len=2", "eval_loader.dataset.max_seq_len=2 must be an integer ≥ 3"),
        ("float32_matmul_precision=low", "float32_matmul_precision=low must be one of highest, high, medium"),
        ("ddp_sync_strategy=often", "ddp_sync_strategy=often must be one of single_auto_sync, "),
        ("dist_timeout=0", "dist_timeout=0.0 must be a number > 0"),
        ("hf_export=always", "hf_export=always must be one of end, save"),
        ("device=tpu", "device=tpu must be one of gpu, cpu"),
        ("precision=fp8", "precision=fp8 must be one of fp32, amp_bf16, amp_fp16"),
        ("save_folder=s3://bucket/run", "save_folder=s3://bucket/run is not a local folder"),
        (
            "load_path=a.pt model.pretrained_checkpoint=b",
            "load_path and model.pretrained_checkpoint both name what to start from",
        ),
        ("load_position=false", "load_position=false is about load_path; set that, or omit it"),
        (
            "train_loader.dataset.tokenizer_name=other",
            "train_loader.dataset.tokenizer_name=other differs from tokenizer_name=",
        ),
        (
            "activation_checkpointing=true fsdp_config.activation_checkpointing=true",
            "activation_checkpointing is set twice",
        ),
        (
            "on_nonfinite_loss=skip algorithms.gradient_clipping.clipping_type=value",
            "on_nonfinite_loss=skip cannot see infinite gradients",
        ),
    ],
)
def test_a_value_that_breaks_a_rule_is_rejected(config_file, override, message):
    with pytest.raises(UserError) as error:
        pretrain(config_file, *override.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "override",
    [
        "max_duration=3e9tok",
        "eval_interval=0.1dur",
        "save_interval=1ep",
        "log_interval=10ba",
        "save_interval=7EP",
        "device_train_microbatch_size=auto",
        "eval_subset_num_batches=-1",
        "precision=null",
        "seed=4294967295",
    ],
)
def test_a_value_within_its_rule_is_accepted(config_file, override):
    pretrain(config_file, override)


@pytest.mark.parametrize(
    ("units", "value"),
    [
        ("ba sp ep tok", "1.5ep"),
        ("ba sp ep tok", "60sec"),
        ("ba sp ep tok", "1h30m"),
        ("ba sp ep tok", "1iter"),
        ("ba sp ep tok", "1dur"),
        ("ba", "0ba"),
        ("ba", "10sp"),
        ("ba dur", "0.5ba"),
        ("ba dur", "0dur"),
        ("ba", 500),
        ("ba", "-3ba"),
        ("ba", "ba"),
        ("ba", ""),
        ("ba", "1e999ba"),
        ("ba", "nanba"),
        ("ba", None),
    ],
)
def test_a_value_that_is_not_a_duration_is_rejected_with_its_key(units, value):
    rule = Rule(units=tuple(units.split()), above=0)
    with pytest.raises(UserError) as error:
        check_value("tasks.x.eval_interval", value, str, rule)
    assert str(error.value).startswith(f"tasks.x.eval_interval={value} is not a duration > 0; give a number and ")
    assert all(f"{unit} ({TIME_UNITS[unit]})" in str(error.value) for unit in rule.units)


# What a resumed run may change


def test_fixed_settings_are_the_keys_that_may_not_change():
    @dataclass
    class Loader:
        path: str = key("may change", "a", may_change=True)
        streams: dict[str, Any] = key("some keys may change", {}, may_change=("local", "cache"))
        split: str = key("fixed", "train")

    @dataclass
    class Run:
        loader: Loader = field(default_factory=Loader)
        seed: int = key("fixed", 1)
        device: str = key("may change", "cpu", may_change=True)

    streams = {"web": {"local": "x", "proportion": 0.5, "deep": {"cache": 1, "repeat": 2}}}
    config = Run(Loader(streams=streams))
    assert fixed_settings(to_dict(config), Run) == {
        "loader.streams": {"web": {"proportion": 0.5, "deep": {"repeat": 2}}},
        "loader.split": "train",
        "seed": 1,
    }


def test_fixed_settings_of_a_pretraining_run_determine_its_numbers(config_file):
    given = "train_loader.dataset.streams={web: {local: a, remote: b, predownload: 1, cache_limit: 1gb, proportion: 1}}"
    fixed = fixed_settings(to_dict(pretrain(config_file, given)), PretrainConfig)
    loaders = {
        f"{loader}.{name}"
        for loader in ("train_loader", "eval_loader")
        for name in (
            "drop_last",
            "dataset.streams",
            "dataset.split",
            "dataset.tokenizer_name",
            "dataset.max_seq_len",
            "dataset.mlm_probability",
            "dataset.whole_word_masking",
            "dataset.packing",
            "dataset.pad_to_max_length",
            "dataset.shuffle",
            "dataset.seed",
            "dataset.num_canonical_nodes",
            "dataset.shuffle_algo",
            "dataset.shuffle_block_size",
            "dataset.batching_method",
            "dataset.hub",
            "dataset.data_subset",
            "dataset.text_column",
            "dataset.val_fraction",
            "dataset.concat_tokens",
        )
    }
    assert fixed.keys() == loaders | {
        "run_name",
        "model",
        "tokenizer_name",
        "max_seq_len",
        "mlm_probability",
        "state_passing",
        "optimizer",
        "scheduler",
        "algorithms",
        "precision",
        "global_train_batch_size",
        "float32_matmul_precision",
        "seed",
        "load_path",
        "load_position",
    }
    assert fixed["train_loader.dataset.streams"] == {"web": {"proportion": 1}}

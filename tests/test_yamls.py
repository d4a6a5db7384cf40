"""The project's configs: each builds its model, with the parameters that docs/pretraining.md states, and trains."""

import itertools
import re
from collections import Counter

import pytest
import torch
from conftest import ROOT, write_jsonl

from src.convert_dataset import main as convert
from src.data.streaming import build as build_loader
from src.lion import LionConfig, LionForImageClassification, LionForMaskedLM
from src.lra.tasks import LRA, SUITE, LraConfig
from src.lra.training import build_model, build_settings
from src.mlm.task import PretrainConfig
from src.training.config import load_config
from src.vision.config import VisionConfig
from src.vision.task import build_vision_config

MODELS = sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*.yaml") if "-" in path.stem)
VOCABULARY = {"tiny": 8192}  # the demo's; otherwise BERT's, rounded up to a multiple of 8


def build(name: str, **changes: int) -> LionForMaskedLM:
    config = load_config(PretrainConfig, "main.py", "", [str(ROOT / f"yamls/pretrain/{name}.yaml")])
    sizes = {"vocab_size": VOCABULARY.get(name.rsplit("-", 1)[-1], 30528), **config.model, **changes}
    return LionForMaskedLM(LionConfig(**sizes))


@pytest.mark.parametrize("name", MODELS)
def test_the_docs_state_the_parameters_of_every_model(name):
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(name).parameters())
    if name.endswith("-large") and name != "hydra-large":
        assert round(parameters, -6) == 335_000_000
    else:
        table = (ROOT / "docs/pretraining.md").read_text()
        rows = re.findall(r"^\| `([\w-]+)\.yaml` .*?\| *([\d,]+) \|$", table, re.MULTILINE)
        assert dict(rows).get(name) == f"{parameters:,}", f"the table of configs has another number for {name}, or none"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("-base") or name == "lion-s-base-8k"])
def test_layers_of_a_base_model_learn_in_one_step(name):
    torch.manual_seed(0)
    model = build(name, num_hidden_layers=2, vocab_size=1024).train()
    ids = torch.randint(1024, (2, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.zero_grad()
    assert losses[1] < losses[0]


def test_annealing_reads_as_many_whole_documents_as_short_ones(tmp_path, tokenizer, tokenizer_folder):
    data = write_jsonl(tmp_path / "data.jsonl", [f"{'the old ship sees ' * 12}{number}" for number in range(30)])
    for name, length in (("whole", 40), ("short", 8)):
        given = ["--data_files", data, "--splits", "train", "--tokenizer", tokenizer_folder, "--max_seq_len", length]
        convert([*map(str, given), "--out_root", str(tmp_path / "data" / name)])
    changes = [f"data_local={tmp_path}/data", f"tokenizer_name={tokenizer_folder}", "max_seq_len=48"]
    path = ROOT / "yamls/pretrain/lion-s-base-8k-anneal.yaml"
    config = load_config(PretrainConfig, "main.py", "", [str(path), *changes, "train_loader.num_workers=0"])
    assert config.eval_loader.dataset.local == f"{tmp_path}/data/whole" and not config.eval_loader.dataset.streams
    batches = [*build_loader(config.train_loader, tokenizer, 15, train=True)]
    lengths = [batch["sample_lengths"][batch["sample_lengths"] > 0].tolist() for batch in batches]
    assert Counter(itertools.chain(*lengths)) == {40: 30, 8: 30}
    assert all({*of_batch} == {40, 8} for of_batch in lengths)
    assert batches[0]["input_ids"].shape[1] == 48  # in which a whole document and a short one share a row


IMAGE_MODELS = {path.stem: path for path in sorted((ROOT / "yamls/vision").glob("*.yaml"))}
RUNS = [name for name in IMAGE_MODELS if name not in ("recipe", "recipe-deit3", "tiny", "small", "base", "digits")]


def image_model(name: str, classes: int) -> LionForImageClassification:
    config = load_config(VisionConfig, "vision.py", "", [str(IMAGE_MODELS[name])])
    names = [f"class {number}" for number in range(classes)]
    return LionForImageClassification(build_vision_config(dict(config.model), config.image_size, names))


@pytest.mark.parametrize("name", RUNS)
def test_the_docs_state_the_parameters_of_every_image_model(name):
    with torch.device("meta"):
        model = image_model(name, 10 if name.startswith(("digits", "cifar")) else 1000)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kind, _, size = name.rpartition("-")
    if kind in ("deit3", "deit3-base", "fine-tune") or name.startswith(("digits", "cifar")):
        return
    table = re.findall(
        r"^\| `([\w-]+)-\*\.yaml` .*?\| *([\d,]+) \| *([\d,]+) \| *([\d,]+) \|$",
        (ROOT / "docs/vision.md").read_text(),
        re.M,
    )
    rows = {row[0]: dict(zip(("tiny", "small", "base"), row[1:])) for row in table}
    assert rows[kind][size] == f"{parameters:,}"


@pytest.mark.parametrize("name, lr, drop_path, size", [("small", 4e-3, 0.05, 224), ("base", 3e-3, 0.2, 192)])
def test_the_recipes_of_deit3(name, lr, drop_path, size):
    config = load_config(VisionConfig, "vision.py", "", [str(IMAGE_MODELS[f"deit3-{name}"])])
    assert (config.max_duration, config.global_train_batch_size, config.train_loader.repeats) == ("800ep", 2048, 3)
    assert (config.optimizer["name"], config.optimizer["lr"], config.optimizer["weight_decay"]) == ("lamb", lr, 0.05)
    rates = [lr * config.scheduler[alpha] for alpha in ("alpha_i", "alpha_f")]
    assert rates == pytest.approx([1e-6, 1e-5], rel=1e-3) and config.scheduler["t_warmup"] == "5ep"
    given = config.augmentation
    assert (given.policy, given.jitter, given.erasing, config.crop_pct) == ("three_augment", 0.3, 0.0, 1.0)
    assert (config.mixing.mixup, config.mixing.cutmix) == (0.8, 1.0)
    assert (config.loss.kind, config.loss.smoothing, config.image_size) == ("binary", 0.0, size)
    assert (config.model["drop_path_rate"], config.model["layer_scale_init"]) == (drop_path, 1e-4)


def test_the_recipes_of_fine_tuning():
    config = load_config(VisionConfig, "vision.py", "", [str(IMAGE_MODELS["deit3-base-224"])])
    assert (config.max_duration, config.global_train_batch_size, config.train_loader.repeats) == ("20ep", 512, 1)
    assert (config.optimizer["name"], config.optimizer["lr"], config.optimizer["weight_decay"]) == ("adamw", 1e-5, 0.1)
    assert (config.scheduler["alpha_i"], config.scheduler["alpha_f"], config.crop_pct) == (0.1, 1.0, 1.0)
    given = config.augmentation
    assert (given.policy, given.magnitude, given.erasing) == ("randaugment", "m9-mstd0.5-inc1", 0.0)
    assert (config.loss.kind, config.loss.smoothing, config.model["drop_path_rate"]) == ("soft", 0.1, 0.2)
    config = load_config(VisionConfig, "vision.py", "", [str(IMAGE_MODELS["fine-tune-384"])])
    assert (config.image_size, config.max_duration) == (384, "30ep")
    assert (config.optimizer["lr"], config.optimizer["weight_decay"]) == (5e-6, 1e-8)
    assert config.scheduler["name"] == "constant"


def test_the_recipe_is_deits():
    config = load_config(VisionConfig, "vision.py", "", [str(IMAGE_MODELS["lion-s-small"])])
    assert (config.max_duration, config.global_train_batch_size, config.train_loader.repeats) == ("300ep", 1024, 3)
    assert config.optimizer == {
        "name": "adamw", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05, "filter_bias_norm_wd": True
    }  # fmt: skip
    given = config.augmentation
    assert (given.crop, given.area, given.flip, given.policy) == ("resized", [0.08, 1.0], 0.5, "randaugment")
    assert (given.magnitude, given.jitter, given.erasing) == ("m9-mstd0.5-inc1", 0.0, 0.25)
    assert (config.mixing.mixup, config.mixing.cutmix, config.mixing.switch, config.mixing.chance) == (
        0.8,
        1.0,
        0.5,
        1.0,
    )
    assert (config.loss.kind, config.loss.smoothing, config.model["drop_path_rate"]) == ("soft", 0.1, 0.1)
    assert config.scheduler == {"name": "cosine_over_run", "t_warmup": "5ep", "alpha_i": 0.001, "alpha_f": 0.01}
    assert round(2 ** (-1 / 17328), 6) == 0.99996 and config.algorithms == {"ema": {"half_life": "17328ba"}}


LRA_MODELS = sorted(path.stem for path in (ROOT / "yamls/lra").glob("*.yaml") if path.stem != "recipe")


def lra_settings(name: str, task: str) -> tuple[dict, LraConfig]:
    config = load_config(LraConfig, "lra.py", "", [str(ROOT / f"yamls/lra/{name}.yaml"), f"tasks_to_run=[{task}]"])
    (chosen,) = SUITE.select(config.tasks_to_run, config.tasks, config.default_seed)
    return build_settings(chosen, config, {}), config


@pytest.mark.parametrize("task", LRA)
@pytest.mark.parametrize("name", LRA_MODELS)
def test_every_model_of_long_range_arena_is_built_at_its_size(name, task):
    settings, config = lra_settings(name, task)
    assert config.base_run_name == f"lra-{name}" and config.default_seed == 1
    with torch.device("meta"):
        model = build_model(settings, None, config)
    assert {key: settings[key] for key in LRA[task].model} == LRA[task].model
    assert sum(parameter.numel() for parameter in model.parameters()) > 500_000


@pytest.mark.parametrize("task", LRA)
def test_pretraining_for_long_range_arena_has_the_model_and_length_of_the_task(task):
    config = load_config(PretrainConfig, "main.py", "", [str(ROOT / f"yamls/lra/pretrain/{task}.yaml")])
    settings, _ = lra_settings("lion-s", task)
    assert config.max_seq_len == LRA[task].max_length and config.run_name == f"lra-pretrain-{task}"
    assert config.eval_loader.dataset.mlm_probability == config.mlm_probability
    of_task = {"vocab_size", "max_position_embeddings", "hidden_dropout_prob", "classifier_pooling"}
    of_task |= {"num_labels", "reads_values", "reads_pairs"}
    built = LionConfig(**config.model).to_dict()
    assert {key: built[key] for key in settings.keys() - of_task} == {
        key: settings[key] for key in settings.keys() - of_task
    }


SHORT = sorted(path.stem for path in (ROOT / "yamls/lra/short").glob("*.yaml") if path.stem != "recipe")


def test_models_of_short_expressions_are_compared_as_equals():
    """Same training and sizes, and as many parameters to within those of decays."""
    trained, sizes = [], {}
    for name in SHORT:
        settings, config = lra_settings(f"short/{name}", "listops")
        assert config.base_run_name == f"lra-short-{name}" and config.lra_dir == "lra_short"
        (task,) = SUITE.select(config.tasks_to_run, config.tasks, config.default_seed)
        trained.append((task.lr, task.batch_size, task.epochs, task.seeds, task.max_length, config.scheduler))
        with torch.device("meta"):
            model = build_model(settings, None, config)
        sizes[name] = sum(parameter.numel() for name, parameter in model.named_parameters() if ".decay" not in name)
    assert all(one == trained[0] for one in trained) and len({*sizes.values()}) == 1, sizes

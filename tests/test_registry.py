"""Config → objects: every name and argument is checked, and a mistake is told with the nearest known name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.loggers import FileLogger
from composer.models import ComposerClassifier
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from conftest import TINY_MODEL, VOCABULARY
from transformers import BertTokenizerFast

from src.errors import UserError
from src.lion import LionConfig, LionForMaskedLM
from src.training import registry
from src.training.optim import FusedDecoupledAdamW


@pytest.fixture(scope="module")
def model() -> LionForMaskedLM:
    return LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=64))


def optimizer(model, **changes):
    return registry.build_optimizer({"name": "decoupled_adamw", "lr": 1e-3, "weight_decay": 0.1, **changes}, model)


# Names and arguments


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda m: optimizer(m, name="adamW"), ["optimizer", "'adamW'", "did you mean adamw?"]),
        (lambda m: optimizer(m, name="lamb9"), ["optimizer", "known are adamw, decoupled_adamw"]),
        (lambda m: optimizer(m, name=None), ["optimizer", "None"]),
        (lambda m: optimizer(m, leraning_rate=1), ["unknown key optimizer.leraning_rate"]),
        (lambda m: optimizer(m, beta=[0.9, 0.98]), ["unknown key optimizer.beta", "did you mean betas?"]),
        (lambda m: optimizer(m, params=[]), ["unknown key optimizer.params"]),
        (lambda m: optimizer(m, lr=-1), ["optimizer", "decoupled_adamw", "-1"]),
        (lambda m: optimizer(m, lr="fast"), ["optimizer", "decoupled_adamw"]),
        (lambda m: optimizer(m, betas=[0.9]), ["optimizer.betas", "two numbers", "[0.9]"]),
        (lambda m: optimizer(m, betas=0.9), ["optimizer.betas"]),
        (lambda m: optimizer(m, weight_decay="much"), ["optimizer", "decoupled_adamw"]),
        (lambda _: registry.build_scheduler({"name": "linear_decay"}), ["scheduler", "did you mean linear_decay_with_warmup?"]),
        (lambda _: registry.build_scheduler({"name": "cosine_with_warmup", "t_warmup": "1ba", "alpha": 0}), ["scheduler.alpha", "alpha_f"]),
        (lambda _: registry.build_scheduler({"name": "cosine_with_warmup"}), ["scheduler", "t_warmup"]),
        (lambda _: registry.build_scheduler({"name": "cosine_with_warmup", "t_warmup": "soon"}), ["scheduler", "soon"]),
        (lambda _: registry.build_scheduler({"name": "linear_decay_with_warmup", "t_warmup": 100}), ["scheduler.t_warmup", "100", "dur"]),
        (lambda _: registry.build_scheduler({"name": "constant_with_warmup", "t_warmup": "6%"}), ["scheduler.t_warmup", "6%"]),
        (lambda _: registry.build_scheduler({"name": "warmup_stable_decay", "t_warmup": "1h"}), ["scheduler.t_warmup", "1h"]),
        (lambda _: registry.build_scheduler({"name": "linear_decay_with_warmup", "t_warmup": "9ba"}, "99sp"), ["scheduler", "t_warmup", "same units"]),
        (lambda _: registry.build_scheduler({"name": "cosine_with_warmup", "t_warmup": "1ba", "alpha_f": "low"}), ["scheduler", "cosine_with_warmup"]),
        (lambda _: registry.build_scheduler({}), ["scheduler", "known are"]),
        (lambda _: registry.build_all("algorithms", {"gradient_cliping": {}}), ["algorithms", "did you mean gradient_clipping?"]),
        (lambda _: registry.build_all("algorithms", {"gradient_clipping": {"threshold": 1}}), ["algorithms.gradient_clipping", "threshold"]),
        (lambda _: registry.build_all("algorithms", {"gradient_clipping": {}}), ["gradient_clipping", "clipping_type"]),
        (lambda _: registry.build_all("algorithms", {"gradient_clipping": 1.0}), ["gradient_clipping"]),
        (lambda _: registry.build_all("algorithms", {"gradient_clipping": {"clipping_type": "foo", "clipping_threshold": 1}}), ["algorithms.gradient_clipping.clipping_type", "'foo'", "norm"]),
        (lambda _: registry.build_all("algorithms", {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": -1}}), ["gradient_clipping", "-1"]),
        (lambda _: registry.build_all("callbacks", {"speed_monitr": {}}), ["callbacks", "did you mean speed_monitor?"]),
        (lambda _: registry.build_all("callbacks", {"speed_monitor": {"window": 3}}), ["unknown key callbacks.speed_monitor.window", "window_size"]),
        (lambda _: registry.build_all("loggers", {"tensorbord": {}}), ["loggers", "did you mean tensorboard?"]),
    ],
)  # fmt: skip
def test_unknown_names_and_arguments_are_told_with_the_nearest_known_one(model, build, words):
    with pytest.raises(UserError) as error:
        build(model)
    for word in words:
        assert word in str(error.value)


def test_an_inherited_argument_that_another_object_does_not_have_goes_with_null():
    scheduler = registry.build_scheduler({"name": "constant", "t_warmup": None, "alpha": 0.5})
    assert scheduler.alpha == 0.5


def test_warmup_stable_decay_rises_stays_and_falls_at_the_end(model):
    section = {"name": "warmup_stable_decay", "t_warmup": "2ba", "decay": 0.5, "alpha_f": 0.2}
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 1), torch.zeros(8, dtype=torch.long))
    classifier = ComposerClassifier(torch.nn.Linear(1, 2), num_classes=2)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1.0)
    rates = []

    class Record(Callback):
        def batch_start(self, state, logger):
            rates.append(state.schedulers[0].get_last_lr()[0])

    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    registry.build_trainer(classifier, device="cpu", precision="fp32", train_dataloader=loader, optimizers=optimizer,
                           schedulers=registry.build_scheduler(section), max_duration="8ba", callbacks=[Record()]).fit()  # fmt: skip
    assert rates == pytest.approx([0, 0, 0.5, 1, 1, 1, 0.8, 0.6])  # Composer sets a rate by the steps before the last


@pytest.mark.parametrize("decay", [0, 1.5])
def test_a_decay_that_is_no_share_of_the_run_is_refused(decay):
    with pytest.raises(UserError, match=f"scheduler.decay {decay}"):
        registry.build_scheduler({"name": "warmup_stable_decay", "t_warmup": "2ba", "decay": decay})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_decay_with_warmup", LinearWithWarmupScheduler),
        ("cosine_with_warmup", CosineAnnealingWithWarmupScheduler),
        ("constant_with_warmup", ConstantWithWarmupScheduler),
    ],
)
def test_schedulers_are_built_by_name_with_their_arguments(name, kind):
    options = {} if name == "constant_with_warmup" else {"alpha_f": 0.02}
    scheduler = registry.build_scheduler({"name": name, "t_warmup": "0.06dur", **options})
    assert type(scheduler) is kind
    assert scheduler.t_warmup == "0.06dur"
    if options:
        assert scheduler.alpha_f == 0.02


@pytest.mark.parametrize(("name", "kind"), [("decoupled_adamw", FusedDecoupledAdamW), ("adamw", torch.optim.AdamW)])
def test_optimizers_are_built_over_every_parameter(model, name, kind):
    built = optimizer(model, name=name, betas=[0.9, 0.98], eps=1e-6)
    assert type(built) is kind
    assert len(built.param_groups) == 1
    group = built.param_groups[0]
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.98), 1e-6, 0.1)


def test_filter_bias_norm_wd_decays_matrices_alone(model):
    decayed, free = optimizer(model, filter_bias_norm_wd=True).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    for group, bare in ((decayed, False), (free, True)):
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (name.endswith("bias") or "norm" in name.lower()) == bare, name


def test_a_frozen_parameter_is_not_optimized():
    model = LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=64))
    model.head.dense.weight.requires_grad_(False)
    assert all(p is not model.head.dense.weight for p in optimizer(model).param_groups[0]["params"])


def test_algorithms_callbacks_and_loggers_are_built_and_false_leaves_one_out(tmp_path):
    (clipping,) = registry.build_all("algorithms", {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.5}})
    assert isinstance(clipping, GradientClipping)
    assert clipping.clipping_threshold == 0.5
    callbacks = registry.build_all("callbacks", {"speed_monitor": {"window_size": 7}, "lr_monitor": None, "memory_monitor": False})  # fmt: skip
    assert [type(callback) for callback in callbacks] == [SpeedMonitor, LRMonitor]
    assert isinstance(registry.build_all("loggers", {"file": {"filename": str(tmp_path / "log")}})[0], FileLogger)
    assert registry.build_all("algorithms", {}) == registry.build_all("callbacks", {}) == registry.build_all("loggers", {}) == []


# Device, precision, batch sizes


@pytest.mark.parametrize(("asked", "there", "got"), [(None, True, "gpu"), (None, False, "cpu"), ("cpu", True, "cpu"), ("gpu", True, "gpu")])  # fmt: skip
def test_the_device_is_the_one_asked_for_or_a_gpu_if_there_is_one(monkeypatch, asked, there, got):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert registry.resolve_device(asked) == got


@pytest.mark.parametrize(("asked", "words"), [("gpu", "no GPU is there"), ("tpu", "'tpu'")])
def test_a_device_that_is_not_there_is_refused(monkeypatch, asked, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device: .*{words}"):
        registry.resolve_device(asked)


@pytest.mark.parametrize(
    ("asked", "device", "got"),
    [(None, "gpu", "amp_bf16"), (None, "cpu", "fp32"), ("fp32", "gpu", "fp32"), ("amp_fp16", "gpu", "amp_fp16"), ("amp_bf16", "cpu", "amp_bf16")],
)  # fmt: skip
def test_the_precision_is_the_one_asked_for_or_the_devices_own(asked, device, got):
    assert registry.resolve_precision(asked, device) == got


@pytest.mark.parametrize(("asked", "device"), [("amp_fp16", "cpu"), ("bf16", "gpu"), ("fp8", "gpu")])
def test_a_precision_that_the_device_has_not_is_refused(asked, device):
    with pytest.raises(UserError, match=f"precision: '{asked}'.*fp32"):
        registry.resolve_precision(asked, device)


def test_bfloat16_on_a_cpu_computes_in_bfloat16(tokenizer):
    from src.mlm.model import LionMLM

    model = LionMLM(LionConfig(**TINY_MODEL, vocab_size=len(tokenizer)), tokenizer)
    batch = dict(tokenizer(["the dog"], return_tensors="pt"))
    assert model(batch).logits.dtype == torch.float32
    trainer = registry.build_trainer(model, device="cpu", precision="amp_bf16")
    assert isinstance(trainer, Trainer)
    assert model(batch).logits.dtype == torch.bfloat16
    trainer.close()


class TrainerOfAGPU:
    """Does to the products of float32 what Composer does where it trains on a GPU."""

    def __init__(self, **arguments):
        torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize("precision", [None, "high", "medium"])
def test_products_of_float32_are_rounded_only_where_it_is_asked_for(monkeypatch, precision):
    monkeypatch.setattr(registry, "Trainer", TrainerOfAGPU)
    asked = {"float32_matmul_precision": precision} if precision else {}
    try:
        registry.build_trainer(torch.nn.Linear(1, 1), device="gpu", precision="fp32", **asked)
        assert torch.get_float32_matmul_precision() == (precision or "highest")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("batch", "microbatch", "world", "got"), [(64, 64, 1, 64), (64, 8, 4, 16), (64, "auto", 2, 32), (6, 4, 1, 6)])  # fmt: skip
def test_a_batch_is_divided_among_the_devices(batch, microbatch, world, got):
    assert registry.check_batch_sizes(batch, microbatch, world, "gpu") == got


@pytest.mark.parametrize(
    ("batch", "microbatch", "world", "words"),
    [
        (10, 2, 4, "global_train_batch_size 10 cannot be divided among 4"),
        (64, 32, 4, "device_train_microbatch_size 32 must be auto or between 1 and the 16"),
        (64, 0, 1, "device_train_microbatch_size 0"),
        (64, 1.5, 1, "device_train_microbatch_size 1.5"),
        (64, "many", 1, "device_train_microbatch_size many"),
        (0, "auto", 1, "global_train_batch_size 0"),
        (-8, "auto", 1, "global_train_batch_size -8"),
    ],
)
def test_batch_sizes_that_cannot_be_are_refused(batch, microbatch, world, words):
    with pytest.raises(UserError, match=re.escape(words)):
        registry.check_batch_sizes(batch, microbatch, world, "gpu")


def test_a_cpu_finds_no_microbatch_by_itself():
    with pytest.raises(UserError, match=r"device_train_microbatch_size: auto .* a number, such as 32"):
        registry.check_batch_sizes(64, "auto", 2, "cpu")


# FSDP and torch.compile


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"shard_strategy": "FULL_SHARD"}, "unknown key fsdp_config.shard_strategy; did you mean sharding_strategy?"),
        ({"sharding_strategy": "FULL"}, "fsdp_config.sharding_strategy: 'FULL' is none of NO_SHARD,"),
        ({"state_dict_type": "sharded"}, "fsdp_config.state_dict_type: 'sharded' is none of full"),
        ({"cpu_offload": True}, "fsdp_config.cpu_offload: True is none of False"),
    ],
)
def test_what_fsdp_does_not_know_is_refused(section, words):
    with pytest.raises(UserError, match=re.escape(words)):
        registry.check_fsdp(section)


def test_what_fsdp_knows_is_handed_on_to_gpus_alone():
    section = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True, "cpu_offload": False}
    registry.check_fsdp(section)
    assert registry.parallelism(section, "gpu") == {"fsdp": section}
    assert registry.parallelism({}, "cpu") is None
    with pytest.raises(UserError, match="fsdp_config shards a model over GPUs"):
        registry.parallelism(section, "cpu")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backnd": "eager"}, "unknown key compile_config.backnd; did you mean backend?"),
        ({"model": None}, "unknown key compile_config.model"),
        ({"backend": "inductr"}, "compile_config.backend: unknown name 'inductr'; did you mean inductor?"),
        ({"mode": "fastest"}, "compile_config: torch.compile refuses these arguments: "),
        ("max-autotune", "compile_config must hold `key: value` lines"),
    ],
)
def test_what_torch_compile_does_not_know_is_refused(section, words):
    with pytest.raises(UserError, match=re.escape(words)):
        registry.check_compile(section)


@pytest.mark.parametrize("section", [None, {"backend": "eager", "dynamic": True}])
def test_what_torch_compile_knows_is_accepted(section):
    registry.check_compile(section)


# Times


@pytest.mark.parametrize(
    "times",
    [{"max_duration": "3e9tok"}, {"eval_interval": "0.1dur", "save_interval": "1ep"}, {"log_interval": "10ba"}, {"tasks.x.eval_interval": "5ba"}],
)  # fmt: skip
def test_times_above_0_in_the_units_of_their_key_are_accepted(times):
    registry.check_times(**times)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_duration", "1.5ep"), ("save_interval", "0.5ba"), ("tasks.x.eval_interval", 500), ("max_duration", "60sec"),
        ("max_duration", "1h30m"), ("max_duration", "1iter"), ("max_duration", "1dur"), ("log_interval", "0ba"),
        ("log_interval", "10sp"), ("eval_interval", "0ba"), ("eval_interval", "0dur"), ("save_interval", "-3ba"),
        ("save_interval", "ba"), ("save_interval", ""), ("save_interval", "1e999ba"), ("save_interval", "nanba"),
        ("save_interval", None),
    ],
)  # fmt: skip
def test_what_is_no_time_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=re.escape(f"{name}: {value!r} is no time")):
        registry.check_times(**{name: value})


# Model and tokenizer


def test_the_vocabulary_is_the_tokenizers_rounded_up(tokenizer):
    config = registry.build_lion_config(TINY_MODEL, tokenizer, 64)
    assert config.vocab_size == -(-len(tokenizer) // 8) * 8
    assert config.pad_token_id == tokenizer.pad_token_id
    assert registry.build_lion_config({**TINY_MODEL, "vocab_size": 1000}, tokenizer, 64).vocab_size == 1000


@pytest.mark.parametrize(
    ("changes", "max_seq_len", "words"),
    [
        ({"hiden_size": 64}, 64, ["unknown key model.hiden_size", "did you mean hidden_size?"]),
        ({"mixer": "lion-x"}, 64, ["model", "lion-x", "lion-lit, lion-d, lion-s, softmax"]),
        ({"num_attention_heads": 3}, 64, ["model", "hidden_size 32", "num_attention_heads 3"]),
        ({"vocab_size": 32}, 64, ["model.vocab_size 32", "tokenizer"]),
        ({"num_attention_heads": 0}, 64, ["model.num_attention_heads", "at least 1", "0"]),
        ({"hidden_size": "abc"}, 64, ["model.hidden_size", "an integer", "'abc'"]),
        ({"hidden_size": 32.0}, 64, ["model.hidden_size", "an integer", "32.0"]),
        ({"hidden_act": "gleu"}, 64, ["model.hidden_act", "'gleu'", "gelu"]),
        ({"hidden_act": None}, 64, ["model.hidden_act", "None"]),
        ({"hidden_dropout_prob": 2}, 64, ["model.hidden_dropout_prob", "below 1", "2"]),
        ({"tie_word_embeddings": "yes"}, 64, ["model.tie_word_embeddings", "true or false"]),
        ({"mixer": "softmax"}, 256, ["max_seq_len 256", "max_position_embeddings 128", "softmax"]),
        ({"mixer": "lion-lit"}, 256, ["max_seq_len 256", "max_position_embeddings 128", "lion-lit"]),
        ({"attention_form": "chunkwise", "attention_probs_dropout_prob": 0.1}, 64, ["attention_probs_dropout_prob", "chunkwise"]),
        ({"attention_form": "chunkwse", "attention_probs_dropout_prob": 0.0}, 64, ["attention_form", "chunkwse"]),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused(tokenizer, changes, max_seq_len, words):
    with pytest.raises(UserError) as error:
        registry.build_lion_config({**TINY_MODEL, **changes}, tokenizer, max_seq_len)
    for word in words:
        assert word in str(error.value)


def test_values_of_the_types_of_the_model_are_accepted(tokenizer):
    changes = {
        "hidden_dropout_prob": 0,
        "classifier_dropout": None,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    config = registry.build_lion_config({**TINY_MODEL, **changes}, tokenizer, 64)
    assert {name: getattr(config, name) for name in changes} == changes


@pytest.mark.parametrize("mixer", ["lion-d", "lion-s"])
def test_a_mixer_with_decay_reads_texts_longer_than_the_position_table(tokenizer, mixer):
    assert registry.build_lion_config({**TINY_MODEL, "mixer": mixer}, tokenizer, 4096).mixer == mixer


def test_a_tokenizer_is_read_from_its_folder(tokenizer_folder):
    tokenizer = registry.build_tokenizer(str(tokenizer_folder), 40)
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer.model_max_length == 40


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing", ["nobody/nothing", "no folder here", "Hub"]),  # the Hub refuses, see conftest.py
        ("bert-base-uncased", ["bert-base-uncased", "Hub"]),
        ("./nowhere", ["./nowhere", "no such folder"]),
        ("a/b/c", ["a/b/c"]),
        ("{empty}", ["holds no tokenizer"]),
    ],
)
def test_a_tokenizer_that_cannot_be_had_is_told_in_one_sentence(tmp_path, name, words):
    with pytest.raises(UserError) as error:
        registry.build_tokenizer(name.format(empty=tmp_path), 64)
    assert str(error.value).startswith("tokenizer_name: ")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("damage", ["code", "content"])
def test_a_tokenizer_that_brings_code_or_is_damaged_is_refused(tmp_path, tokenizer_folder, damage):
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "damaged"))
    if damage == "code":
        settings = {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": [None, "code.Other"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "code.py").write_text("raise SystemExit('run')")
    else:
        (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"tokenizer_name: cannot load .* holds no tokenizer that transformers can load"
    ):
        registry.build_tokenizer(str(folder), 64)


@pytest.mark.parametrize("token", ["mask_token", "pad_token"])
def test_a_tokenizer_without_mask_or_padding_is_refused(tmp_path, tokenizer_folder, token):
    tokenizer = BertTokenizerFast(str(tokenizer_folder / "vocab.txt"))
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path / "without")
    with pytest.raises(UserError, match=f"has no {token}"):
        registry.build_tokenizer(str(tmp_path / "without"), 64)

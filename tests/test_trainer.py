"""What depends on the machine: device, precision, batch sizes, FSDP, torch.compile; and Composer's trainer."""

import re

import pytest
import torch
from composer import Trainer
from conftest import TINY_MODEL

from src.errors import UserError
from src.lion import LionConfig
from src.mlm.model import LionMLM
from src.training import trainer

# Device, precision, batch sizes


@pytest.mark.parametrize(
    ("requested", "available", "device"),
    [(None, True, "gpu"), (None, False, "cpu"), ("cpu", True, "cpu"), ("gpu", True, "gpu")],
)
def test_the_device_is_the_requested_one_or_a_gpu_if_there_is_one(monkeypatch, requested, available, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert trainer.resolve_device(requested) == device


def test_an_unavailable_device_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=gpu, but no GPU is available"):
        trainer.resolve_device("gpu")


@pytest.mark.parametrize(
    ("requested", "device", "precision"),
    [
        (None, "gpu", "amp_bf16"),
        (None, "cpu", "fp32"),
        ("fp32", "gpu", "fp32"),
        ("amp_fp16", "gpu", "amp_fp16"),
        ("amp_bf16", "cpu", "amp_bf16"),
    ],
)
def test_the_precision_is_the_requested_one_or_the_default_of_the_device(requested, device, precision):
    assert trainer.resolve_precision(requested, device) == precision


def test_a_precision_that_the_device_lacks_is_rejected():
    with pytest.raises(UserError, match="precision=amp_fp16 needs a GPU; set precision=amp_bf16 or fp32"):
        trainer.resolve_precision("amp_fp16", "cpu")


def test_bfloat16_on_a_cpu_computes_in_bfloat16(tokenizer):
    model = LionMLM(LionConfig(**TINY_MODEL, vocab_size=len(tokenizer)), tokenizer)
    batch = dict(tokenizer(["the dog"], return_tensors="pt"))
    assert model(batch).logits.dtype == torch.float32
    composer_trainer = trainer.build_trainer(model, device="cpu", precision="amp_bf16")
    assert isinstance(composer_trainer, Trainer)
    assert model(batch).logits.dtype == torch.bfloat16
    composer_trainer.close()


class GPUTrainer:
    """Allows TF32, as Composer does when it trains on a GPU."""

    def __init__(self, **arguments):
        torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize("precision", [None, "high", "medium"])
def test_float32_products_are_rounded_only_on_request(monkeypatch, precision):
    monkeypatch.setattr(trainer, "Trainer", GPUTrainer)
    requested = {"float32_matmul_precision": precision} if precision else {}
    try:
        trainer.build_trainer(torch.nn.Linear(1, 1), device="gpu", precision="fp32", **requested)
        assert torch.get_float32_matmul_precision() == (precision or "highest")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("batch", "microbatch", "world", "device_batch"),
    [(64, 64, 1, 64), (64, 8, 4, 16), (64, 32, 4, 16), (64, "auto", 2, 32), (6, 4, 1, 6)],
)
def test_a_batch_is_split_among_the_devices(batch, microbatch, world, device_batch):
    assert trainer.split_batch_size(batch, microbatch, world, "gpu") == device_batch


@pytest.mark.parametrize(
    ("batch", "microbatch", "world", "words"),
    [
        (10, 2, 4, "global_train_batch_size=10 is not divisible by 4 devices; use a multiple of 4"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_rejected(batch, microbatch, world, words):
    with pytest.raises(UserError, match=re.escape(words)):
        trainer.split_batch_size(batch, microbatch, world, "gpu")


def test_a_cpu_cannot_choose_a_microbatch():
    with pytest.raises(UserError, match="device_train_microbatch_size=auto needs a GPU; give a number, such as 32"):
        trainer.split_batch_size(64, "auto", 2, "cpu")


# FSDP and torch.compile


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"shard_strategy": "FULL_SHARD"}, "unknown key fsdp_config.shard_strategy; did you mean sharding_strategy?"),
        ({"sharding_strategy": "FULL"}, "fsdp_config.sharding_strategy=FULL must be one of NO_SHARD,"),
        ({"state_dict_type": "sharded"}, "fsdp_config.state_dict_type=sharded must be one of full"),
        ({"cpu_offload": True}, "fsdp_config.cpu_offload=True must be one of False"),
    ],
)
def test_unsupported_fsdp_settings_are_rejected(section, words):
    with pytest.raises(UserError, match=re.escape(words)):
        trainer.check_sections(section, {}, "gpu")


def test_fsdp_settings_are_accepted_on_gpus_only():
    section = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True, "cpu_offload": False}
    trainer.check_sections(section, {}, "gpu")
    trainer.check_sections({}, {}, "cpu")
    with pytest.raises(UserError, match="fsdp_config shards a model over GPUs"):
        trainer.check_sections(section, {}, "cpu")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backnd": "eager"}, "unknown key compile_config.backnd; did you mean backend?"),
        ({"model": None}, "unknown key compile_config.model"),
        ({"backend": "inductr"}, "compile_config: torch.compile rejects these arguments: Invalid backend: 'inductr'"),
        ({"mode": "fastest"}, "compile_config: torch.compile rejects these arguments: "),
    ],
)
def test_unknown_compile_settings_are_rejected(section, words):
    with pytest.raises(UserError, match=re.escape(words)):
        trainer.check_sections({}, section, "cpu")


@pytest.mark.parametrize(
    ("given", "device", "fsdp", "tried", "arguments"),
    [
        ("auto", "gpu", {}, True, {}),
        ("auto", "cpu", {}, True, None),
        ("auto", "gpu", {"sharding_strategy": "FULL_SHARD"}, True, None),
        ("auto", "gpu", {}, False, None),
        (None, "gpu", {}, True, None),
        ({"mode": "default"}, "cpu", {}, False, {"mode": "default"}),
    ],
)
def test_auto_compiles_on_a_gpu_what_was_tried_there(given, device, fsdp, tried, arguments):
    assert trainer.resolve_compilation(given, device, fsdp, tried) == arguments


@pytest.mark.parametrize("section", [{}, {"backend": "eager", "dynamic": True}])
def test_compile_settings_are_accepted(section):
    trainer.check_sections({}, section, "cpu")

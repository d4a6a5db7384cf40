"""The encoder as a Composer model: evaluation, operations per step, and equal numbers when sharded."""

import pytest
import torch
from conftest import MIXERS, TINY_MODEL, run, settings_of
from torch.utils._python_dispatch import TorchDispatchMode

from src.data.batches import split_batch
from src.lion import LionConfig, cpu_kernel
from src.mlm.model import LionMLM


def build(tokenizer, **changes) -> LionMLM:
    return LionMLM(LionConfig(**settings_of(**{**TINY_MODEL, "vocab_size": len(tokenizer), **changes})), tokenizer)


@pytest.mark.parametrize("mixer", MIXERS)
def test_evaluation_returns_the_models_logits_at_labelled_positions(tokenizer, mixer):
    model = build(tokenizer, mixer=mixer).eval()
    ids = torch.randint(5, len(tokenizer), (2, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    batch["labels"][0, 3:5] = 7
    for _ in range(2):  # the second call equals the first
        torch.testing.assert_close(model.eval_forward(batch), model(batch).logits[0, 3:5])
        assert model.labels.tolist() == [7, 7]


class Synchronisations(TorchDispatchMode):
    """Records the operations that would wait for a GPU, since their result or its shape depends on values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        by_truth = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_truth or name in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "is_nonzero", "equal"):
            self.seen.append(name)
        return operation(*args, **kwargs or {})


def labelled_batch(tokenizer) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, len(tokenizer), (4, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    batch["labels"][:, 3:5] = 7
    return batch


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_microbatch_never_synchronises_a_gpu(mixer, tokenizer, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", False)  # as on a GPU
    model = build(tokenizer, mixer=mixer).train()
    (part,) = split_batch(labelled_batch(tokenizer), 4)
    (metric,) = model.get_metrics(is_train=True).values()
    with Synchronisations() as recorder:
        outputs = model(part)
        outputs.loss.backward()
        model.update_metric(part, model.eval_forward(part, outputs), metric)
    assert recorder.seen == []
    assert len(outputs.logits) == metric.total == 8
    assert metric.compute() == (outputs.logits.argmax(-1) == 7).float().mean()
    with recorder:  # which does find them
        model(labelled_batch(tokenizer))
    assert recorder.seen == ["nonzero"]


def test_an_evaluation_batch_without_labels_does_not_count(tokenizer):
    model = build(tokenizer).eval()
    batch = labelled_batch(tokenizer) | {"labels": torch.full((4, 12), -100)}
    outputs = model.eval_forward(batch)
    for metric in model.get_metrics(is_train=False).values():
        assert model.update_metric(batch, outputs, metric) == {}


def test_an_evaluation_in_bfloat16_sums_its_losses_in_float32(tokenizer):
    model = build(tokenizer).eval()
    model.cpu_bfloat16 = True
    assert model.eval_forward(labelled_batch(tokenizer)).dtype == torch.float32


def test_the_operations_of_a_step_depend_on_the_attention_form(tokenizer):
    def width(length: int, mixer: str = "lion-s", form: str = "auto", dropout: float = 0.0) -> float:
        """Products per token beside those with weights, divided by the hidden size."""
        model = build(tokenizer, mixer=mixer, attention_form=form, attention_probs_dropout_prob=dropout, chunk_size=16)
        batch = {"input_ids": torch.zeros(2, length), "labels": torch.full((2, length), -100)}
        weights = sum(parameter.numel() for parameter in model.model.lion.layers.parameters())
        return (model.flops_per_batch(batch) / (6 * 2 * length) - weights) / (2 * model.config.hidden_size)

    states = 2 * 16  # two of 16×16 per head of width 16
    assert width(4096) == width(4096, form="chunkwise") == 16 + states
    assert width(8, form="chunkwise") == 8 + states
    assert width(4096, form="recurrent") == states
    assert width(32) == width(32, form="full") == 32
    assert width(4096, "softmax") == width(4096, form="full") == width(4096, dropout=0.1) == 4096


@pytest.mark.slow
def test_a_sharded_model_computes_the_same_as_an_unsharded_one(tokenizer_folder, tmp_path):
    result = run("tests/fsdp_ranks.py", tokenizer_folder, tmp_path / "meeting")
    assert result.returncode == 0, result.stderr

"""Losses of image classification and of learning from a teacher, against their definitions; and teachers of each kind."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, ResNetConfig, ResNetForImageClassification

from src.checkpoints.processors import processor_settings
from src.checkpoints.reading import Checkpoint
from src.errors import UserError
from src.lion import LionForImageClassification, LionVisionConfig
from src.vision.config import DistillationConfig, LossConfig
from src.vision.model import LionImageClassifier, Top1, Top5
from src.vision.task import load_weights
from src.vision.teachers import Teacher, read_teacher

SIZES = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 7,
}
CLASSES = [f"LABEL_{number}" for number in range(7)]
PROCESSOR = processor_settings(16)


def classifier(loss=None, distillation=None, teacher=None, **changes) -> LionImageClassifier:
    torch.manual_seed(0)
    model = LionForImageClassification(LionVisionConfig(**SIZES, **changes))
    return LionImageClassifier(model, PROCESSOR, loss or LossConfig(), distillation or DistillationConfig(), teacher)


def batch(count=6):
    torch.manual_seed(1)
    labels = torch.arange(count) % 7
    targets = F.one_hot(labels, 7).float() * 0.7 + F.one_hot(labels.flip(0), 7) * 0.3
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": labels, "targets": targets}


def test_the_loss_is_that_of_the_targets_and_not_of_the_labels():
    model, given = classifier(), batch()
    outputs = model(given)
    expected = -(given["targets"] * outputs["logits"].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(model.loss(outputs, given), expected)
    assert outputs.get("loss") is None


def test_the_binary_loss_counts_every_class_with_any_weight():
    model, given = classifier(LossConfig("binary", 0.0)), batch()
    outputs = model(given)
    p, positive = outputs["logits"].sigmoid(), given["targets"] > 0
    expected = -torch.where(positive, p, 1 - p).log().mean()
    torch.testing.assert_close(model.loss(outputs, given), expected)


@pytest.mark.parametrize("token", [False, True])
def test_hard_and_soft_distillation(token):
    given, teacher_logits = batch(), torch.randn(6, 7)
    for kind in ("hard", "soft"):
        settings = DistillationConfig("it", kind, 0.3, 2.5)
        model = classifier(distillation=settings, teacher=lambda pixels: teacher_logits, distillation_token=token)
        model.model.train()
        outputs = model(given)
        own = outputs["class_logits"] if token else outputs["logits"]
        student = outputs["distillation_logits"] if token else outputs["logits"]
        base = -(given["targets"] * own.log_softmax(-1)).sum(-1).mean()
        if kind == "hard":
            expected = -student.log_softmax(-1)[torch.arange(6), teacher_logits.argmax(-1)].mean()
        else:
            p, q = (teacher_logits / 2.5).softmax(-1), (student / 2.5).softmax(-1)
            expected = (p * (p / q).log()).sum() * 2.5**2 / (6 * 7)
        torch.testing.assert_close(model.loss(outputs, given), 0.7 * base + 0.3 * expected)


def test_without_a_teacher_both_tokens_learn_the_labels():
    given = batch()
    model = classifier(distillation_token=True)
    model.model.train()
    outputs = model(given)
    expected = -(given["targets"] * outputs["logits"].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(model.loss(outputs, given), expected)
    model.loss(outputs, given).backward()
    assert model.model.distillation_classifier.weight.grad.abs().max() > 0


def test_a_teachers_weights_are_not_the_models():
    teacher = Teacher(torch.nn.Linear(2, 2), None, PROCESSOR, PROCESSOR)
    model = classifier(teacher=teacher)
    assert not any("teacher" in name for name in [*model.state_dict(), *dict(model.named_parameters())])
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


class Seen(torch.nn.Module):
    def forward(self, x):
        self.x = x
        return x.new_zeros(len(x), 7)


def test_a_teacher_sees_images_as_it_was_trained():
    image = torch.rand(2, 3, 16, 16)
    student, own = processor_settings(16), processor_settings(16, mean=(0.5, 0.6, 0.7), std=(0.1, 0.2, 0.3))
    mean, std = (torch.tensor(student[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    model = Seen()
    Teacher(model, (16, 16), own, student)((image - mean) / std)
    mean, std = (torch.tensor(own[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    torch.testing.assert_close(model.x, (image - mean) / std)
    Teacher(model, (32, 32), own, student)((image - mean) / std)
    assert model.x.shape == (2, 3, 32, 32)


def test_teachers_of_transformers_ours_and_timm(tmp_path, monkeypatch):
    torch.manual_seed(0)
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=7, layer_type="basic")
    ).eval()
    resnet.save_pretrained(tmp_path / "resnet")
    deit = DeiTForImageClassificationWithTeacher(
        DeiTConfig(16, 1, 2, 16, image_size=32, patch_size=8, num_labels=7)
    ).eval()
    deit.save_pretrained(tmp_path / "deit")
    with pytest.raises(UserError, match=r"has no preprocessor_config.json, so how it was trained is unknown"):
        read_teacher(str(tmp_path / "deit"), CLASSES, PROCESSOR)
    deit.deit.save_pretrained(tmp_path / "encoder")
    for name in ("resnet", "deit", "encoder"):
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(UserError, match=r"lacks weights of a classifier"):
        read_teacher(str(tmp_path / "encoder"), CLASSES, PROCESSOR)
    images = batch()["pixel_values"]
    for name, expected in (("resnet", resnet(images).logits), ("deit", None)):
        teacher = read_teacher(str(tmp_path / name), CLASSES, PROCESSOR)
        logits = teacher(images)
        assert logits.shape == (6, 7) and not logits.requires_grad
        if expected is not None:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    import timm

    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name, num_classes=7))
    for name in ("resnet10t", "timm/resnet10t"):
        assert read_teacher(name, CLASSES, PROCESSOR)(images).shape == (6, 7)


def test_mistakes_about_teachers(tmp_path):
    with pytest.raises(UserError, match=r"distillation.teacher: timm cannot load no_such_model"):
        read_teacher("no_such_model", CLASSES, PROCESSOR)
    with pytest.raises(UserError, match=r"distillation.teacher: nobody/nothing"):
        read_teacher("nobody/nothing", CLASSES, PROCESSOR)
    model = classifier().model
    model.config.id2label = dict(enumerate("gfedcba"))
    model.save_pretrained(tmp_path / "own")
    read = read_teacher(str(tmp_path / "own"), list("gfedcba"), PROCESSOR)
    torch.testing.assert_close(read(batch()["pixel_values"]), model.eval()(batch()["pixel_values"]).logits)
    with pytest.raises(UserError, match="has 7 classes, and the data 3; name another"):
        read_teacher(str(tmp_path / "own"), ["a", "b", "c"], PROCESSOR)
    for classes, place in (
        ("abcdefg", "a has number 6 in .*, and 0 in"),
        ("bgfedca", "b has number 5 in .*, and 0 in"),
    ):
        with pytest.raises(UserError, match=f"distillation.teacher: the class {place} the data; name another"):
            read_teacher(str(tmp_path / "own"), list(classes), PROCESSOR)
    with pytest.raises(UserError, match=r"the class g has number 0 in .*, and 1 in the data"):
        read_teacher(str(tmp_path / "own"), list("hgfedcb"), PROCESSOR)  # shifted: one is new, one is gone
    read_teacher(str(tmp_path / "own"), ["a goldfish", *"fedcba"], PROCESSOR)  # as it may name its class g


def test_a_token_that_a_start_lacks_is_named_also_where_positions_are_resized():
    start = classifier(mixer="softmax", position_embedding="learned").model
    settings = {**SIZES, "image_size": 32, "mixer": "softmax", "distillation_token": True}
    model = LionForImageClassification(LionVisionConfig(**settings))
    read = Checkpoint(Path("it.pt"), "LionForImageClassification", start.config, start.state_dict())
    with pytest.raises(UserError, match=r"model\.distillation_token=true, .* the token is not in the checkpoint"):
        load_weights(model, read)


def test_metrics():
    logits, labels = torch.eye(7)[:4] + torch.arange(7) / 100, torch.tensor([0, 1, 6, 0])
    top1, top5 = Top1(7), Top5(7)
    top1.update(logits, labels)
    top5.update(logits, labels)
    assert float(top1.compute()) == 0.5 and float(top5.compute()) == 0.75
    few = Top5(3)
    few.update(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    assert float(few.compute()) == 1.0

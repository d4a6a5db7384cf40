"""The losses of the heads are those of BERT's in transformers."""

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from src.lion import LionConfig, LionForImageClassification, LionForSequenceClassification, LionVisionConfig
from src.lion.losses import classification_loss

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


CLASSES, NUMBERS = torch.tensor([0, 2, 1, 2]), torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
CASES = [  # labels, how many, problem_type
    (CLASSES, 3, None),
    (CLASSES, 3, "single_label_classification"),
    (NUMBERS, 3, None),
    (NUMBERS, 3, "multi_label_classification"),
    (NUMBERS, 3, "regression"),
    (NUMBERS[:, 0], 1, None),
    (NUMBERS[:, :1], 1, "regression"),
    (NUMBERS[:, :1], 1, "multi_label_classification"),
]


@pytest.mark.filterwarnings("ignore:Using a target size")  # of BERT, for one label
@pytest.mark.parametrize(("labels", "count", "kind"), CASES)
def test_the_loss_is_that_of_bert(labels, count, kind):
    sizes = {**SMALL, "vocab_size": 20, "intermediate_size": 16}
    config = BertConfig(**sizes, num_labels=count, problem_type=kind)
    output = BertForSequenceClassification(config).eval()(torch.ones(4, 5, dtype=torch.int64), labels=labels)
    own = LionConfig(num_labels=count, problem_type=kind)
    torch.testing.assert_close(classification_loss(own, output.logits, labels), output.loss)
    assert own.problem_type == config.problem_type is not None


def test_labels_of_another_kind_than_the_first_are_named():
    config = LionConfig(num_labels=3)
    classification_loss(config, torch.zeros(4, 3), NUMBERS)
    with pytest.raises(ValueError, match=r"multi_label_classification needs labels of shape \(4, 3\) \(got \(4,\)\)"):
        classification_loss(config, torch.zeros(4, 3), CLASSES)


@pytest.mark.parametrize("reads", ["texts", "images"])
def test_texts_and_images_may_have_several_labels(reads):
    if reads == "texts":
        model = LionForSequenceClassification(LionConfig(vocab_size=20, **SMALL, num_labels=3)).eval()
        output = model(torch.ones(4, 5, dtype=torch.int64), labels=NUMBERS)
    else:
        model = LionForImageClassification(LionVisionConfig(16, 8, **SMALL, num_labels=3)).eval()
        output = model(torch.randn(4, 3, 16, 16), labels=NUMBERS, interpolate_pos_encoding=True)
    torch.testing.assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, NUMBERS))

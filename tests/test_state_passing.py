"""State passing: in training, texts begin with the final states of others, as if those stood on both sides of them."""

import pytest
import torch
from test_modeling_lion import D, assert_same, build, gradients, project, texts
from torch.nn import functional as F

from src.lion import LionModel

PASSING = [
    ("lion-lit", {"position_embedding": "none"}), ("lion-d", {}), ("lion-s", {}),
    ("lion-d", {"feature_map": "silu", "normalize_rows": True}), ("lion-d", {"separate_decays": True}),
    ("lion-s", {"decay_horizon": [2, 40], "key_weight": "linear"}), ("hydra", {}),
]  # fmt: skip


def passing(mixer: str, donors: list[int], monkeypatch, **changes) -> LionModel:
    """A model in training in which each text gets the states of its donor."""
    model = build(mixer, LionModel, **changes)
    model.set_state_passing(1.0)
    monkeypatch.setattr(model, "_draw_donors", lambda x, seq_idx: torch.tensor(donors))
    return model.train()


@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize(("mixer", "options"), PASSING)
def test_in_training_a_text_reads_the_states_of_another_as_if_that_stood_on_both_sides(
    mixer, options, form, monkeypatch
):
    donors, inputs = [2, -1, 0], texts(padded=True)
    if mixer == "hydra":  # convolutions would reach across
        options = {**options, "d_conv": 1}
    model = passing(mixer, donors, monkeypatch, num_hidden_layers=1, **options)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    found = model(ids, mask, attention_form=form).last_hidden_state
    model.eval()
    alone = model(ids, mask).last_hidden_state
    same = [torch.allclose(y[real], x[real], atol=1e-3) for y, x, real in zip(found, alone, mask)]
    assert same == [False, True, False]
    for number, donor in enumerate(donors):
        own, other = (ids[place][mask[place]] if place >= 0 else ids[0, :0] for place in (number, donor))
        whole = model(torch.cat([other, own, other])[None]).last_hidden_state[0, len(other) :]
        inner = slice(1, len(own) - 1) if mixer == "hydra" else slice(len(own))  # whose first and last token read none
        torch.testing.assert_close(found[number, inner], whole[inner], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mixer", "options"), PASSING)
def test_padding_does_not_change_what_is_passed(mixer, options, monkeypatch):
    model, ids = passing(mixer, [1, 0], monkeypatch, **options), texts(2, 15)["input_ids"]
    expected = model(ids).last_hidden_state
    for left, right in ((0, 9), (4, 0), (3, 30)):
        padded, mask = (F.pad(x, (left, right)) for x in (ids, torch.ones_like(ids)))
        found = model(padded, mask).last_hidden_state[:, left : left + 15]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_states_are_passed_without_gradients_by_chance_and_in_training_only():
    model = build("lion-s", LionModel)
    embeds = torch.randn(3, 9, D, requires_grad=True)
    alone = model(inputs_embeds=embeds).last_hidden_state
    model.set_state_passing(0.5)
    assert torch.equal(model(inputs_embeds=embeds).last_hidden_state, alone)
    model.train()
    torch.manual_seed(0)
    drawn = torch.stack([model._draw_donors(embeds, None) for _ in range(600)])
    assert not (drawn == torch.arange(3)).any()
    counts = torch.stack([(drawn == donor).float().mean(0) for donor in (-1, 0, 1, 2)])
    assert (counts - torch.tensor([[2, 2, 2], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) / 4).abs().max() < 0.08
    received = 0
    while not received:  # by the second text
        before = torch.get_rng_state()
        received = model._draw_donors(embeds, None)[1] >= 0
    torch.set_rng_state(before)
    passed = model(inputs_embeds=embeds).last_hidden_state
    assert not torch.allclose(passed[1], alone[1], atol=1e-4)
    project(passed[1]).backward()
    assert embeds.grad[1].abs().min() > 0 == embeds.grad[[0, 2]].abs().max()
    assert torch.allclose(model(inputs_embeds=embeds[:1]).last_hidden_state, alone[:1], atol=1e-6)  # of a batch of one
    with pytest.raises(ValueError, match="one text per row"):
        model(inputs_embeds=embeds, seq_idx=torch.zeros(3, 9, dtype=torch.long))
    for mixer, options in (("softmax", {}), ("lion-lit", {}), ("lion-d", {"position_embedding": "rope"})):
        with pytest.raises(ValueError, match=r"has no states|with position embeddings"):
            build(mixer, LionModel, **options).set_state_passing(0.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        model.set_state_passing(7)


@pytest.mark.parametrize("mixer", ["lion-d", "lion-s", "hydra"])
def test_passed_states_are_the_same_with_recomputed_layers_and_compiled(mixer, monkeypatch):
    model, inputs = passing(mixer, [2, -1, 0], monkeypatch), texts(padded=True)
    expected = model(**inputs).last_hidden_state
    wanted = gradients(model, project(expected))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(gradients(model, project(model(**inputs).last_hidden_state)), wanted, tolerance=0)
    model.gradient_checkpointing_disable()
    layer, x = model.layers[0], torch.randn(3, 21, D)
    arguments = x, inputs["attention_mask"].bool(), None, "chunkwise"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    donors = torch.tensor([2, -1, 0])
    torch.testing.assert_close(compiled(*arguments, donors=donors)[0], layer(*arguments, donors=donors)[0])
    with torch.autocast("cpu", torch.bfloat16):
        close = model(**inputs).last_hidden_state
    torch.testing.assert_close(close.float(), expected, atol=0.1, rtol=0.1)

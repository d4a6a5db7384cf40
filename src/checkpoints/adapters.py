"""Map the parameter names and settings of the checkpoints published by the paper's authors to ours.

They are `LIONS-EPFL/{BERT,LION-Lit,LION-D,LION-S}-{base,large}-mlm` on the Hub.
"""

import re

import torch
from torch import Tensor

from src.errors import UserError, first_line
from src.lion import LionConfig

MIXERS = {
    "attention": "softmax",
    "linear_attention": "lion-lit",
    "lion-lit": "lion-lit",
    "nova": "lion-d",
    "lion-d": "lion-d",
    "nova-inputdep": "lion-s",
    "lion-s": "lion-s",
}

# Their name → ours. They store query, key and value as three tensors; we store them as one.
RENAMED = (
    (r"^bert\.embeddings\.", "lion.embeddings."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"lion.layers.\1.attention.\2."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.layer_norm\.", r"lion.layers.\1.attention.norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.ai$", r"lion.layers.\1.attention.decay"),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.Wa_i\.", r"lion.layers.\1.attention.decay."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"lion.layers.\1.attention.out."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"lion.layers.\1.attention_norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.intermediate\.dense\.", r"lion.layers.\1.mlp_in."),
    (r"^bert\.encoder\.layer\.(\d+)\.output\.dense\.", r"lion.layers.\1.mlp_out."),
    (r"^bert\.encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"lion.layers.\1.mlp_norm."),
    (r"^bert\.pooler\.dense\.", "lion.pooler."),
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.decoder\.", "head.decoder."),
    (r"^classifier\.", "classifier."),
)


def config_from_published(config: dict, source: str = "the checkpoint") -> LionConfig:
    """Convert their config to ours. Raises UserError for an unknown `arch_type` or values that LionConfig rejects."""
    arch = str(config.get("arch_type", "attention"))
    if arch not in MIXERS:
        raise UserError(f"arch_type {arch!r} of {source} must be one of {', '.join(MIXERS)}")
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
        "initializer_range", "layer_norm_eps", "pad_token_id", "classifier_dropout", "num_labels", "id2label",
        "label2id", "problem_type",
    )  # fmt: skip
    try:
        return LionConfig(mixer=MIXERS[arch], **{name: config[name] for name in same if config.get(name) is not None})
    except Exception as error:  # whatever arithmetic raises for a value of the wrong type
        raise UserError(f"the config of {source} is not valid ({first_line(error)})") from None


def state_dict_from_published(state: dict[str, Tensor], config: LionConfig) -> dict[str, Tensor]:
    """Return their tensors under our names, without duplicates and without those that the variant does not use.

    Omitted: `position_ids` (a constant), `cls.predictions.bias` (a copy of the decoder's bias), the position table of
    LION-D and LION-S (not used), BERT's next-sentence head, a classifier's masked-LM head and a masked LM's pooler.

    Raises:
        UserError: a tensor is unknown, or tensors that belong together do not match; the message names them.
    """
    ours, unknown = {}, []
    classifier, masked_lm = (
        any(name.startswith(part) for name in state) for part in ("classifier.", "cls.predictions.")
    )
    unread = ["cls.seq_relationship."]
    unread += ["cls.predictions."] if classifier else ["bert.pooler."] if masked_lm else []
    if not config.has_positions:
        unread.append("bert.embeddings.position_embeddings.")
    for name, tensor in state.items():
        if name.endswith("position_ids") or name == "cls.predictions.bias" or name.startswith(tuple(unread)):
            continue
        for pattern, replacement in RENAMED:
            renamed, found = re.subn(pattern, replacement, name)
            if found:
                ours[renamed] = tensor
                break
        else:
            unknown.append(name)
    if unknown:
        raise UserError(f"the checkpoint holds tensors that no LION model has: {', '.join(sorted(unknown))}")
    if "cls.predictions.bias" in state and not classifier:
        bias = ours.setdefault("head.decoder.bias", state["cls.predictions.bias"])
        if not torch.equal(bias.double(), state["cls.predictions.bias"].double()):
            both = "cls.predictions.bias and cls.predictions.decoder.bias"
            raise UserError(f"{both} of the checkpoint differ, but are one tensor in the model")
    for query in [name for name in ours if ".attention.query." in name]:
        names = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(name in ours for name in names):
            shapes = {tuple(ours[name].shape) for name in names}
            if len(shapes) > 1 or () in shapes:
                raise UserError(f"{', '.join(names)} of the checkpoint must have the same shape")
            ours[query.replace(".query.", ".qkv.")] = torch.cat([ours.pop(name) for name in names])
    return ours

"""The encoders to compare: ours, and Hugging Face's BERT and ModernBERT, equally deep and about as large."""

import torch

from src.lion import LionConfig, LionForMaskedLM, LionModel
from src.lion.mixers import MIXERS

BERT, MODERN_BERT = "Hugging Face BERT", "Hugging Face ModernBERT"
LINEAR = tuple(name for name, mixer in MIXERS.items() if mixer.has_states)
MODELS = (BERT, MODERN_BERT, "softmax", *LINEAR)
VOCABULARY = 30528


def build(
    name: str, layers: int, hidden: int, longest: int, dropout=0.0, form="auto", masked_lm=False
) -> torch.nn.Module:
    """Build the encoder `name` with random weights for texts of up to `longest` tokens, optionally with an MLM head."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "max_position_embeddings": max(512, longest),
    }
    of_bert = {"intermediate_size": 4 * hidden, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == BERT:
        from transformers import BertConfig, BertForMaskedLM, BertModel

        return (BertForMaskedLM if masked_lm else BertModel)(BertConfig(**sizes, **of_bert, attn_implementation="sdpa"))
    if name == MODERN_BERT:
        from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

        # Its MLP has three matrices, so two thirds of BERT's width. It too predicts at labelled tokens only.
        dropouts = {"embedding_dropout": dropout, "mlp_dropout": dropout, "attention_dropout": dropout}
        tokens = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "pad_token_id": 0}
        options = {"sparse_prediction": True, "reference_compile": False, "attn_implementation": "sdpa"}
        config = ModernBertConfig(**sizes, intermediate_size=8 * hidden // 3, **dropouts, **tokens, **options)
        return (ModernBertForMaskedLM if masked_lm else ModernBertModel)(config)
    config = LionConfig(**sizes, **of_bert, mixer=name, attention_form=form)
    return (LionForMaskedLM if masked_lm else LionModel)(config)


def compile_layers(model: torch.nn.Module) -> None:
    """torch.compile each layer of a model, its first ModuleList, for the shapes that it is called with."""
    torch._dynamo.config.recompile_limit = 256  # in transformers the layers of all models share one function to compile
    for layer in next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        layer.compile(dynamic=False)

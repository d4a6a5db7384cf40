"""The encoders that the benchmarks compare: ours, and Hugging Face's BERT and ModernBERT with as many layers and about as many weights."""

import torch

from src.lion import LionConfig, LionForMaskedLM, LionModel
from src.lion.configuration_lion import MIXERS

BERT, MODERN_BERT = "Hugging Face BERT", "Hugging Face ModernBERT"
LINEAR = tuple(mixer for mixer in MIXERS if mixer != "softmax")
MODELS = (BERT, MODERN_BERT, "softmax", *LINEAR)
VOCABULARY = 30528
COLORS = {
    BERT: "gray", MODERN_BERT: "tab:red", "softmax": "black",
    "lion-lit": "tab:green", "lion-d": "tab:orange", "lion-s": "tab:blue",
}  # fmt: skip


def build(
    name: str, layers: int, hidden: int, longest: int, *, dropout: float = 0.0, form: str = "auto", masked_lm: bool = False
) -> torch.nn.Module:  # fmt: skip
    """The encoder `name` with random weights, for texts of up to `longest` tokens; with a masked-language-model head if asked."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "max_position_embeddings": max(512, longest),
    }  # fmt: skip
    of_bert = {"intermediate_size": 4 * hidden, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == BERT:  # imported here, since it makes tensors, before which src has its say
        from transformers import BertConfig, BertForMaskedLM, BertModel

        return (BertForMaskedLM if masked_lm else BertModel)(BertConfig(**sizes, **of_bert, attn_implementation="sdpa"))
    if name == MODERN_BERT:
        from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

        # its MLP has three matrices, so two thirds of BERT's width; it too predicts at labelled tokens alone
        config = ModernBertConfig(
            **sizes, intermediate_size=8 * hidden // 3, embedding_dropout=dropout, mlp_dropout=dropout,
            attention_dropout=dropout, sparse_prediction=True, reference_compile=False, attn_implementation="sdpa",
            bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, pad_token_id=0,
        )  # fmt: skip
        return (ModernBertForMaskedLM if masked_lm else ModernBertModel)(config)
    config = LionConfig(**sizes, **of_bert, mixer=name, attention_form=form)
    return (LionForMaskedLM if masked_lm else LionModel)(config)


def compile_layers(model: torch.nn.Module) -> None:
    """torch.compile each layer of a model, which are its first list of modules, for the shapes that it is called with."""
    torch._dynamo.config.recompile_limit = 256  # transformers gives the layers of all models one function to compile
    for layer in next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        layer.compile(dynamic=False)

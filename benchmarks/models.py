"""The encoders to compare: ours, and Hugging Face's BERT and ModernBERT, equally deep and about as large. A layer of
Hydra has no MLP and is about half of another's, so Hydra has about twice as many."""

import argparse
import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from transformers.utils import is_flash_attn_2_available

from src.lion import LionConfig, LionForMaskedLM, LionModel
from src.lion.mixers import MIXERS

BERT, MODERN_BERT = "Hugging Face BERT", "Hugging Face ModernBERT"
SPARSE_BERT = "Hugging Face BERT, sparse"  # logits at labelled tokens only
FLASH = "flash_attention_2, unpadded"
PLUS = "lion-s-plus"
PRETRAIN = Path(__file__).resolve().parents[1] / "yamls/pretrain"
LINEAR = (*(name for name, mixer in MIXERS.items() if mixer.has_states), PLUS)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
SIZES += ("hidden_dropout_prob", "attention_probs_dropout_prob", "vocab_size", "attention_form")
SIZES += ("pretrained_checkpoint",)  # the benchmark's, not a config's
MODELS = (BERT, MODERN_BERT, "softmax", *LINEAR)
TRAINED = (BERT, SPARSE_BERT, *MODELS[1:])
VOCABULARY = 30528
HYDRA_LAYERS = {12: 23, 24: 45}  # of base and large size, for those of BERT


def model_name(name: str) -> str:
    """Return `name`, an argument, if it is one of TRAINED or an existing pretraining config."""
    if name not in TRAINED and not (name.endswith(".yaml") and Path(name).is_file()):
        raise argparse.ArgumentTypeError(f"{name!r} must be a pretraining config or one of {'; '.join(TRAINED)}")
    return name


def layer_count(mixer: str, layers: int) -> int:
    """Return the number of layers with this mixer that is comparable to `layers` of BERT."""
    return HYDRA_LAYERS.get(layers, 2 * layers - 1) if mixer == "hydra" else layers


def describe(names: Iterable[str], layers: int, hidden: int) -> str:
    """Say how deep and wide the models are."""
    names = [lion_arguments(name, hidden)["mixer"] if name.endswith(".yaml") else name for name in names]
    if names == ["hydra"]:
        return f"{layer_count('hydra', layers)} layers of {hidden}"
    hydra = f" ({layer_count('hydra', layers)} in hydra)" if "hydra" in names else ""
    return f"{layers} layers{hydra} of {hidden}"


def lion_arguments(name: str, hidden: int) -> dict:
    """Return the arguments of LionConfig that make the model `name`: its mixer, or those of its config but the sizes.
    An MLP that is narrower than BERT's stays so in proportion."""
    if name != PLUS and not name.endswith(".yaml"):
        return {"mixer": name}
    from omegaconf import OmegaConf  # here, since the other models need neither

    from src.config import read_file

    path = PRETRAIN / f"{PLUS}-base.yaml" if name == PLUS else Path(name)
    given = OmegaConf.to_container(read_file(path)).get("model", {})
    given = {key: value for key, value in given.items() if key != "pretrained_checkpoint"}
    config = LionConfig(**given)
    width = config.intermediate_size and config.intermediate_size * hidden // config.hidden_size
    own = {key: value for key, value in given.items() if key not in SIZES}
    return own | {"mixer": config.mixer, "intermediate_size": width}


def unusual_size(layers: int, hidden: int) -> dict[str, bool]:
    """Return what the name of a file says of models of another than base size."""
    return {f"{layers}-layers-of-{hidden}": (layers, hidden) != (12, 768)}


def bert_sizes(mixer: str, layers: int, hidden: int) -> dict[str, int]:
    """Return the sizes of a configuration as BERT's, with heads of 64. Hydra derives its heads and has no MLP."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layer_count(mixer, layers)}
    of_bert = {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden}
    return sizes if mixer == "hydra" else sizes | of_bert


def setting(name: str, device: str, half: bool) -> dict[str, str]:
    """Return {"attention": how a model with softmax attention computes it on a GPU}, for a Hugging Face model the
    fastest way of those available; nothing for other models, and on a CPU, where it is always sdpa, with masks only in
    ModernBERT's local layers. half: whether attention is computed in bfloat16."""
    if device != "cuda" or name not in (BERT, SPARSE_BERT, MODERN_BERT, "softmax"):
        return {}
    if name == MODERN_BERT:
        return {"attention": FLASH if half and is_flash_attn_2_available() else "sdpa, masks in local layers only"}
    return {"attention": f"sdpa, no mask, {sdpa_backend(half)}"}  # BERT has no other way to FlashAttention


def sdpa_backend(half: bool) -> str:
    """The name of the implementation of attention that torch takes on a GPU."""
    x = torch.empty(1, 12, 128, 64, device="cuda", dtype=torch.bfloat16 if half else torch.float32)
    return SDPBackend(torch._fused_sdp_choice(x, x, x)).name.lower()


def titled(row: dict) -> str:
    """Return the name of a row's model with its setting."""
    return f"{row['model']} ({row['attention']})" if "attention" in row else row["model"]


def build(
    name: str, layers: int, hidden: int, longest: int, dropout=0.0, form="auto", masked_lm=False, half=False
) -> torch.nn.Module:
    """Build the encoder `name` with random weights for texts of up to `longest` tokens without padding, optionally with
    an MLM head, on the default device; a Hugging Face model in its `setting`."""
    if name in (BERT, SPARSE_BERT, MODERN_BERT):
        chosen = setting(name, torch.get_default_device().type, half).get("attention")
        model = build_peer(name, layers, hidden, longest, dropout, masked_lm, chosen == FLASH)
        if chosen != FLASH and (name == MODERN_BERT or chosen):
            drop_masks(model)
        return model
    config = lion_config(name, layers, hidden, longest, dropout, form)
    return (LionForMaskedLM if masked_lm else LionModel)(config)


def build_peer(
    name: str, layers: int, hidden: int, longest: int, dropout: float, masked_lm: bool, flash: bool
) -> torch.nn.Module:
    """Build Hugging Face's BERT or ModernBERT as `build` does."""
    sizes = table_sizes(longest) | bert_sizes(name, layers, hidden)
    if name != MODERN_BERT:
        from transformers import BertConfig, BertForMaskedLM, BertModel

        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        sparse = {"sparse_prediction": name == SPARSE_BERT}  # read by `masked_lm_loss` only
        config = BertConfig(**sizes, **dropouts, **sparse, attn_implementation="sdpa")
        return (BertForMaskedLM if masked_lm else BertModel)(config)
    from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

    # Its MLP has three matrices, so two thirds of BERT's width. It too predicts at labelled tokens only.
    sizes["intermediate_size"] = 8 * hidden // 3
    dropouts = {"embedding_dropout": dropout, "mlp_dropout": dropout, "attention_dropout": dropout}
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "pad_token_id": 0}
    attention = "flash_attention_2" if flash else "sdpa"
    options = {"sparse_prediction": True, "reference_compile": False}  # `compile_layers` compiles more
    config = ModernBertConfig(**sizes, **dropouts, **tokens, **options, attn_implementation=attention)
    return (ModernBertForMaskedLM if masked_lm else ModernBertModel)(config)


def drop_masks(model: torch.nn.Module) -> None:
    """Tell a Hugging Face encoder that texts have no padding. In each pass it would look for some, for which it waits
    for the GPU, as a CUDA graph cannot; and ModernBERT would make masks of all pairs of tokens, partly on the CPU, also
    for its global layers, which FlashAttention computes only without."""
    encoder, model.config.pad_token_id = model.base_model, None
    if model.config.model_type == "bert":
        encoder.attn_implementation = None  # so that it calls the next line
        encoder.get_extended_attention_mask = lambda *mask: None
        return

    @functools.lru_cache(1)
    def local(length: int) -> Tensor:
        place = torch.arange(length, device=model.device)
        far = (place[:, None] - place).abs() > model.config.local_attention // 2
        return torch.zeros(1, 1, length, length, dtype=model.dtype, device=model.device).masked_fill(far, -torch.inf)

    def with_masks(_, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        masks = {"full_attention": None, "sliding_attention": local(arguments[0].shape[1])}
        return arguments, {"attention_mask": masks, **options}

    if hasattr(encoder, "_update_attention_mask"):  # before transformers 5
        encoder._update_attention_mask = lambda mask, output_attentions: (None, local(mask.shape[1]))
    else:
        encoder.register_forward_pre_hook(with_masks, with_kwargs=True)


def masked_lm_loss(
    model: torch.nn.Module, ids: Tensor, labels: Tensor, labelled: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    """Return the loss at the labelled tokens, whose positions in the flattened labels, (labelled,), are known. seq_idx:
    the text of each token in packed rows, for our models only."""
    if seq_idx is not None and model.config.model_type != LionConfig.model_type:
        raise ValueError(f"{model.config.model_type} has no packed rows")
    if is_sparse(model):  # ModernBERT's own way waits for the GPU, and fails with FlashAttention
        x = model.base_model(ids).last_hidden_state.flatten(0, 1).index_select(0, labelled)
        logits = model.cls(x) if model.config.model_type == "bert" else model.decoder(model.head(x))
        return F.cross_entropy(logits.float(), labels.flatten().index_select(0, labelled))
    if model.config.model_type == "bert":  # which computes the logits of all tokens
        return model(input_ids=ids, labels=labels).loss
    return model(input_ids=ids, labels=labels, masked_positions=labelled, seq_idx=seq_idx).loss


def is_sparse(model: torch.nn.Module) -> bool:
    """Whether a Hugging Face model is to compute logits at labelled tokens only, which `masked_lm_loss` does for it."""
    return getattr(model.config, "sparse_prediction", False)


def lion_config(name: str, layers: int, hidden: int, longest: int, dropout=0.0, form="auto") -> LionConfig:
    """Return the configuration of an encoder of this project, `name`, for texts of up to `longest` tokens."""
    arguments = lion_arguments(name, hidden)
    mixer = arguments["mixer"]
    sizes = table_sizes(longest) | bert_sizes(mixer, layers, hidden)
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": None if mixer == "hydra" else dropout}
    return LionConfig(**{**sizes, **dropouts, **arguments}, attention_form=form)


def table_sizes(longest: int) -> dict[str, int]:
    """Return the sizes of the embeddings of words, and of positions for texts of up to `longest` tokens."""
    return {"vocab_size": VOCABULARY, "max_position_embeddings": max(512, longest)}


@contextlib.contextmanager
def created_as(dtype: str, device: str) -> Iterator[None]:
    """Create weights and other tensors in this dtype on this device. Converting them later would count in the peak
    memory."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(usual)


def compile_model(model: torch.nn.Module, mode: str) -> None:
    """torch.compile a model in this mode; the encoder of one whose parts `masked_lm_loss` calls."""
    allow_many_shapes()
    (model.base_model if is_sparse(model) else model).compile(mode=mode)


def allow_many_shapes() -> None:
    """All models of a class share functions to compile: torch would leave those of the ninth model or shape as is."""
    torch._dynamo.config.recompile_limit = 256


def compile_layers(model: torch.nn.Module) -> None:
    """torch.compile each layer of a model, its first ModuleList, for the shapes that it is called with."""
    allow_many_shapes()
    for layer in next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        layer.compile(dynamic=False)

"""The configurations of LION encoders: of texts, LionConfig, and of images, LionVisionConfig."""

import math
from importlib import import_module

from transformers import PretrainedConfig

FORMS = ("auto", "full", "recurrent", "chunkwise")
MIXERS = ("lion-lit", "lion-d", "lion-s", "hydra", "softmax")  # the names of mixers.MIXERS
DECAYING, LINEAR = ("lion-d", "lion-s"), ("lion-lit", "lion-d", "lion-s")
PROJECTED = (*LINEAR, "softmax")
# Options beyond BERT's: the mixers that have them.
OPTIONS = {
    "norm": MIXERS, "normalization": MIXERS, "bias": MIXERS, "position_embedding": MIXERS, "rope_theta": PROJECTED,
    "mlp": PROJECTED, "short_conv": PROJECTED, "value_gate": PROJECTED, "feature_map": LINEAR,
    "normalize_rows": LINEAR, "decay_horizon": DECAYING, "key_weight": DECAYING, "separate_decays": DECAYING,
    "channel_decays": DECAYING,
}  # fmt: skip
CHOICES = {
    "mixer": MIXERS, "attention_form": FORMS, "classifier_pooling": ("cls", "mean"), "norm": ("post", "pre"),
    "normalization": ("layernorm", "rmsnorm"), "mlp": ("gelu", "geglu"), "patch_order": ("raster", "snakes"),
    "feature_map": ("none", "silu", "sigmoid", "elu"), "position_embedding": (None, "learned", "rope", "none"),
    "key_weight": ("none", "linear", "sqrt"), "pooling": ("mean", "attention", "cls"),
}  # fmt: skip


class LayersConfig(PretrainedConfig):
    """What the configurations of encoders of texts and of images share."""

    # transformers' own method resolves aliases, of which there are none here. It hides reads from torch.compile, which
    # would then run a second model with a different mixer on the first model's graph.
    __getattribute__ = object.__getattribute__
    # Defaults of the options are not in the settings of a model, by which earlier results are recognized.
    norm, normalization, bias, mlp, position_embedding, rope_theta = "post", "layernorm", True, "gelu", None, 10000.0
    short_conv, value_gate, feature_map, normalize_rows = 0, False, "none", False
    decay_horizon, key_weight, separate_decays, channel_decays = None, "none", False, False
    output_norm = True  # of lion-lit
    pooling = "mean"  # of LionEmbeddingModel
    segment_length = 65536  # tokens; inference reads longer texts in segments
    num_orders, num_prefix_tokens = 0, 0  # of an image's patches, and tokens before them

    @property
    def has_positions(self) -> bool:
        """Whether the model has learned position embeddings."""
        if self.position_embedding is not None:
            return self.position_embedding == "learned"
        # transformers loads a Hub folder's configuration without mixers.py, so the model there asks its mixer instead.
        return import_module(".mixers", __package__).MIXERS[self.mixer].has_positions


def check_choices(given: dict) -> None:
    """Raise ValueError for a setting that is not among its CHOICES."""
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            names = ("null" if choice is None else choice for choice in choices)
            raise ValueError(f"{name} must be one of {', '.join(names)} (got {given[name]})")


class LionConfig(LayersConfig):
    """Sizes and options of a LION encoder (arXiv:2502.16249; BERT, Devlin et al. 2018). Defaults are the base size.

    Args:
        vocab_size: rows of the word embedding matrix, preferably a multiple of 8.
        mixer: "lion-s" (a decay computed from each token), "lion-d" (one learned decay per head), "lion-lit" (none),
            "hydra" (two state space models and a diagonal, arXiv:2407.09941) or "softmax" (BERT's attention).
        num_attention_heads: 12 if None; in hydra, expand · hidden_size / headdim.
        intermediate_size: width of the MLP, 3,072 if None; hydra has no MLP.
        attention_form: "auto", "full", "recurrent" or "chunkwise": equal results at different costs.
        chunk_size: tokens per chunk of the chunkwise form.
        hidden_dropout_prob: dropout on the embeddings and, except in hydra, on each block's output.
        attention_probs_dropout_prob: dropout on the attention matrix, 0.1 if None; above 0, training needs the full
            form. hydra has none.
        classifier_dropout: dropout before a classification head; `hidden_dropout_prob` if None.
        classifier_pooling: input of the pooler: "cls", the first token; or "mean", the mean of all tokens, which needs
            less training where decay limits how far the first token sees.
        pooling: of tokens to a text's vector, in LionEmbeddingModel: "mean"; "attention", weighted by a softmax of
            their products with one learned vector; or "cls", the first token.
        max_position_embeddings: the longest text of a model with learned position embeddings; others have no limit.
        layer_norm_eps: ε of every norm except lion-lit's own, that of value_gate and those of hydra's layers.
        norm: "post", a norm after each residual sum; or "pre", one before each mixer and MLP, and a last one. As the
            embeddings are normalized, the first mixer has none.
        normalization: "layernorm" or "rmsnorm", which does not subtract the mean.
        bias: whether linear layers and LayerNorms have a bias. The decays and the decoder always do.
        mlp: "gelu", or "geglu", which multiplies by a gate (Shazeer, arXiv:2002.05202); both use `hidden_act`.
        position_embedding: "learned", "rope" (rotated q and k; Su et al., arXiv:2104.09864; not in hydra) or "none";
            None: learned in lion-lit and softmax, none in the others.
        rope_theta: base of the wavelengths of "rope".
        short_conv: width of a depthwise convolution over tokens of q, k and v, which is odd; 0: none.
        value_gate: normalize the outputs of the heads (RMSNorm) and multiply them by SiLU of a projection, as Mamba-2
            and Hydra do.
        feature_map: of q and k: "none"; "silu", (SiLU(x) + ½) / ‖SiLU(x) + ½‖, as in LION's image models; "sigmoid";
            "elu", ELU(x) + 1.
        normalize_rows: divide by the sums of the rows of the attention matrix, which needs a feature map.
        decay_horizon: [lo, hi], tokens that the heads see at the start, spread geometrically: head h of H starts with
            λ = 1 − 1/τ, τ = lo · (hi/lo)^(h/(H−1)). None: λ is about ½, a horizon of two tokens, as published.
        key_weight: weight of a key with decay λ: "none"; "linear", 2(1 − λ), as in gated RFA (Peng et al.,
            arXiv:2103.02143); or "sqrt", the root of 4/3 · (1 − λ²). A sum over more keys is larger; for λ = ½ both
            weights are 1.
        separate_decays: whether past and future keys have decays of their own.
        channel_decays: whether each channel of the keys has a decay of its own (arXiv:2502.16249, theorem B.1), which
            starts as HiPPO's: channel n of a head decays n + 1 times as fast as its first, whose horizon is that of
            `decay_horizon`, [10, 1000] if None.
        long_reach: tokens that the model is to relate to each other: sets, unless they are given, decay_horizon to
            [2, long_reach], feature_map to sigmoid and normalize_rows, which belong together in long texts.
        expand, headdim, d_state, d_conv: of hydra: width of the heads relative to hidden_size, size of a head's values,
            size of queries and keys, and width of the convolution over tokens, which is odd.
    """

    model_type = "lion"

    def __init__(
        self,
        vocab_size: int = 30528,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int | None = None,
        intermediate_size: int | None = None,
        mixer: str = "lion-s",
        attention_form: str = "auto",
        chunk_size: int = 128,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float | None = None,
        classifier_dropout: float | None = None,
        classifier_pooling: str = "cls",
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pad_token_id: int = 0,
        tie_word_embeddings: bool = True,
        expand: int = 2,
        headdim: int = 64,
        d_state: int = 64,
        d_conv: int = 7,
        norm: str = LayersConfig.norm,
        normalization: str = LayersConfig.normalization,
        bias: bool = LayersConfig.bias,
        mlp: str = LayersConfig.mlp,
        position_embedding: str | None = None,
        rope_theta: float = LayersConfig.rope_theta,
        short_conv: int = LayersConfig.short_conv,
        value_gate: bool = LayersConfig.value_gate,
        feature_map: str = LayersConfig.feature_map,
        normalize_rows: bool = LayersConfig.normalize_rows,
        decay_horizon: list | None = None,
        key_weight: str = LayersConfig.key_weight,
        separate_decays: bool = LayersConfig.separate_decays,
        channel_decays: bool = LayersConfig.channel_decays,
        long_reach: int | None = None,
        pooling: str = LayersConfig.pooling,
        **kwargs,
    ):
        if long_reach is not None:
            if mixer not in DECAYING:
                raise ValueError(
                    f"{mixer} has no decays, which long_reach spreads; omit it, or use {', '.join(DECAYING)}"
                )
            decay_horizon = [2, long_reach] if decay_horizon is None else decay_horizon
            feature_map, normalize_rows = "sigmoid" if feature_map == "none" else feature_map, True
        given = locals()
        check_choices(given)
        options = {name: given[name] for name in OPTIONS if given[name] != getattr(LionConfig, name)}
        for name in options:
            if mixer not in OPTIONS[name]:
                raise ValueError(f"{mixer} has no {name}; omit it, or use {', '.join(OPTIONS[name])}")
        if mixer == "hydra" and position_embedding == "rope":
            raise ValueError("hydra cannot rotate its queries and keys (position_embedding: rope); use learned or none")
        if "rope_theta" in options and position_embedding != "rope":
            raise ValueError("rope_theta needs position_embedding: rope; set it, or omit rope_theta")
        if short_conv != 0 and (short_conv < 0 or short_conv % 2 == 0):
            raise ValueError(f"short_conv must be 0 or odd (got {short_conv})")
        if normalize_rows and feature_map == "none":
            raise ValueError(
                "normalize_rows divides by sums, which a feature_map keeps above 0; set it to silu, sigmoid or elu"
            )
        if normalize_rows and position_embedding == "rope":
            raise ValueError("normalize_rows divides by sums, which rope does not keep above 0; omit one")
        if separate_decays and key_weight != "none":
            raise ValueError("key_weight needs one decay per key, and separate_decays gives it two; omit one")
        if decay_horizon is not None:
            decay_horizon = options["decay_horizon"] = checked_horizon(decay_horizon)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 (got {chunk_size})")
        heads, width, dropout = 12, 3072, 0.1
        if mixer == "hydra":
            if expand * hidden_size % headdim:
                raise ValueError(f"expand * hidden_size = {expand * hidden_size} is not divisible by headdim={headdim}")
            if d_conv % 2 == 0:
                raise ValueError(f"d_conv must be odd (got {d_conv})")
            heads, width, dropout = expand * hidden_size // headdim, None, 0.0
            only_values = {
                "num_attention_heads": heads,
                "intermediate_size": width,
                "attention_probs_dropout_prob": dropout,
            }
            for name, only in only_values.items():
                value = given[name]
                if value not in (None, only):
                    raise ValueError(f"hydra has {name}={only} at this size (got {value}); omit it, or set it to null")
        num_attention_heads = heads if num_attention_heads is None else num_attention_heads
        intermediate_size = width if intermediate_size is None else intermediate_size
        if attention_probs_dropout_prob is None:
            attention_probs_dropout_prob = dropout
        if mixer != "hydra" and hidden_size % num_attention_heads:
            raise ValueError(f"hidden_size={hidden_size} is not divisible by num_attention_heads={num_attention_heads}")
        if position_embedding == "rope" and hidden_size // num_attention_heads % 2:
            raise ValueError(f"rope rotates pairs of channels, and a head has {hidden_size // num_attention_heads}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.mixer = mixer
        self.attention_form = attention_form
        self.chunk_size = chunk_size
        self.hidden_act = hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.classifier_dropout = classifier_dropout
        self.classifier_pooling = classifier_pooling
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        if mixer == "hydra":  # not in the settings of other mixers, by which earlier results are recognized
            self.expand = expand
            self.headdim = headdim
            self.d_state = d_state
            self.d_conv = d_conv
        for name, value in options.items():
            setattr(self, name, value)
        if pooling != LayersConfig.pooling:
            self.pooling = pooling
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)

    def options(self) -> dict:
        """The options that differ from their defaults."""
        return {name: getattr(self, name) for name in OPTIONS if name in vars(self)}


class LionVisionConfig(LayersConfig):
    """Sizes and options of a LION image encoder (arXiv:2502.16249; ViT, Dosovitskiy et al., arXiv:2010.11929). Defaults
    are the base size with patches of 16×16 pixels.

    Args:
        image_size: pixels of a square image, or [height, width]; with learned positions, other sizes have them resized.
        patch_size: pixels of a patch in each direction; images are multiples of it.
        mixer: "lion-s" (a decay computed from each token), "lion-d" (one learned decay per head), "lion-lit" (none) or
            "softmax" (ViT).
        patch_order: "raster"; or "snakes", one through rows and one through columns, whose masks are averaged (LION♮).
            lion-lit and softmax have no order.
        class_token: whether the features of an image are those of the class token; otherwise they are the mean of all
            tokens. The token is there in either case. None: the token in softmax, as in ViT, and the mean in the
            others, since decays keep distant patches from the token.
        distillation_token: whether there is a second token, which learns from a teacher (DeiT, Touvron et al.,
            arXiv:2012.12877).
        distillation_classifier: whether that token has a classifier of its own; None: if there is one.
        position_embedding: "learned" or "none"; None: learned in lion-lit and softmax, none in the others.
        feature_map: of q and k; None: "elu", ELU(x) + 1, in lion-lit; "silu", (SiLU(x) + ½) / ‖SiLU(x) + ½‖, in lion-d
            and lion-s. Their attention divides by the sums of rows.
        drop_path_rate: chance with which the last layer drops a residual branch for an image; earlier layers have
            less, the first 0 (Huang et al., arXiv:1603.09382).
        layer_scale_init: initial factors of the residual branches' channels (Touvron et al., arXiv:2103.17239); None:
            no factors.
        intermediate_size: width of the MLP; 4 · hidden_size if None.
        attention_form, chunk_size, decay_horizon, and the others: as in LionConfig.
    """

    model_type = "lion-vision"
    norm, output_norm, separate_decays = "pre", False, False

    def __init__(
        self,
        image_size: list | int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int | None = None,
        mixer: str = "lion-s",
        patch_order: str = "raster",
        class_token: bool | None = None,
        distillation_token: bool = False,
        distillation_classifier: bool | None = None,
        position_embedding: str | None = None,
        feature_map: str | None = None,
        decay_horizon: list | None = None,
        attention_form: str = "auto",
        chunk_size: int = 128,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.0,
        attention_probs_dropout_prob: float = 0.0,
        drop_path_rate: float = 0.0,
        layer_scale_init: float | None = None,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-6,
        **kwargs,
    ):
        if position_embedding is None:
            position_embedding = "learned" if mixer in ("lion-lit", "softmax") else "none"
        linear = mixer in LINEAR
        if class_token is None:
            class_token = not linear
        if feature_map is None:
            feature_map = "elu" if mixer == "lion-lit" else "silu" if linear else "none"
        if mixer not in PROJECTED:
            raise ValueError(f"mixer of images must be one of {', '.join(PROJECTED)} (got {mixer})")
        check_choices(locals())
        if position_embedding == "rope":
            raise ValueError("position_embedding of images must be learned or none (got rope)")
        if linear == (feature_map == "none"):
            raise ValueError(f"feature_map={feature_map} does not apply to {mixer} of images; omit it")
        if decay_horizon is not None:
            if mixer not in DECAYING:
                raise ValueError(f"{mixer} has no decay_horizon; omit it, or use {', '.join(DECAYING)}")
            decay_horizon = checked_horizon(decay_horizon)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 (got {chunk_size})")
        if hidden_size % num_attention_heads:
            raise ValueError(f"hidden_size={hidden_size} is not divisible by num_attention_heads={num_attention_heads}")
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate must be from 0 to below 1 (got {drop_path_rate})")
        sides = image_size if isinstance(image_size, list | tuple) else [image_size] * 2
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise ValueError(f"image_size={image_size} must be a number of pixels, or [height, width]")
        if any(side % patch_size for side in sides):
            raise ValueError(f"image_size={image_size} is not divisible by patch_size={patch_size}")
        self.image_size = image_size
        self.patch_size = patch_size
        self.num_channels = num_channels
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.mixer = mixer
        self.patch_order = patch_order
        self.class_token = class_token
        self.distillation_token = distillation_token
        if distillation_classifier and not distillation_token:
            raise ValueError("distillation_classifier needs distillation_token; set it too")
        self.distillation_classifier = (
            distillation_token if distillation_classifier is None else distillation_classifier
        )
        self.position_embedding = position_embedding
        self.feature_map = feature_map
        self.normalize_rows = linear
        self.decay_horizon = decay_horizon
        self.attention_form = attention_form
        self.chunk_size = chunk_size
        self.hidden_act = hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.drop_path_rate = drop_path_rate
        self.layer_scale_init = layer_scale_init
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        kwargs.pop("normalize_rows", None)  # stored, and follows from the mixer
        super().__init__(**kwargs)

    def options(self) -> dict:
        """Options that are not the paper's."""
        return {} if self.decay_horizon is None else {"decay_horizon": self.decay_horizon}

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image, vertically and horizontally."""
        height, width = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        return height // self.patch_size, width // self.patch_size

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches."""
        return 2 if self.distillation_token else 1

    @property
    def num_orders(self) -> int:
        """Orders of patches with decays of their own."""
        return 2 if self.patch_order == "snakes" else 1


def checked_horizon(horizon) -> list[float]:
    """Return [lo, hi] as numbers. Raises ValueError."""
    try:
        low, high = map(float, horizon)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 1 < low <= high < math.inf:
        raise ValueError(f"decay_horizon must be [lo, hi], tokens with 1 < lo ≤ hi (got {horizon})")
    return [low, high]

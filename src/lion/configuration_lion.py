"""The configuration of a LION encoder."""

from importlib import import_module

from transformers import PretrainedConfig

FORMS = ("auto", "full", "recurrent", "chunkwise")
MIXERS = ("lion-lit", "lion-d", "lion-s", "hydra", "softmax")  # the names of mixers.MIXERS


class LionConfig(PretrainedConfig):
    """Sizes and options of a LION encoder (arXiv:2502.16249; BERT, Devlin et al. 2018). Defaults are the base size.

    Args:
        vocab_size: rows of the word embedding matrix, preferably a multiple of 8.
        mixer: "lion-s" (a decay computed from each token), "lion-d" (one learned decay per head), "lion-lit" (no decay)
            "hydra" (two state space models and a diagonal, arXiv:2407.09941) or "softmax" (BERT's attention).
        num_attention_heads: 12 if None; hydra has expand · hidden_size / headdim.
        intermediate_size: width of the MLP, 3,072 if None; hydra has no MLP.
        attention_form: "auto", "full", "recurrent" or "chunkwise": equal results at different costs.
        chunk_size: tokens per chunk of the chunkwise form.
        hidden_dropout_prob: dropout on the embeddings and, except in hydra, on each block's output.
        attention_probs_dropout_prob: dropout on the attention matrix, 0.1 if None; above 0, training needs the full
            form. hydra has none.
        classifier_dropout: dropout before a classification head; `hidden_dropout_prob` if None.
        classifier_pooling: input of the pooler: "cls", the first token; or "mean", the mean of all tokens, which needs
            less training where decay limits how far the first token sees.
        max_position_embeddings: the longest text of lion-lit and softmax; lion-d and lion-s have no such embeddings.
        layer_norm_eps: ε of every LayerNorm except lion-lit's own and those of hydra's layers.
        expand, headdim, d_state, d_conv: of hydra: width of the heads relative to hidden_size, size of a head's values,
            size of queries and keys, and width of the convolution over tokens, which is odd.
    """

    model_type = "lion"
    # transformers' own method resolves aliases, of which there are none here. It hides reads from torch.compile, which
    # would then run a second model with a different mixer on the first model's graph.
    __getattribute__ = object.__getattribute__

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
        **kwargs,
    ):
        choices = {"mixer": MIXERS, "attention_form": FORMS, "classifier_pooling": ("cls", "mean")}
        for name, value in zip(choices, (mixer, attention_form, classifier_pooling)):
            if value not in choices[name]:
                raise ValueError(f"{name} must be one of {', '.join(choices[name])} (got {value})")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 (got {chunk_size})")
        heads, mlp, dropout = 12, 3072, 0.1
        if mixer == "hydra":
            if expand * hidden_size % headdim:
                raise ValueError(f"expand * hidden_size = {expand * hidden_size} is not divisible by headdim={headdim}")
            if d_conv % 2 == 0:
                raise ValueError(f"d_conv must be odd (got {d_conv})")
            heads, mlp, dropout = expand * hidden_size // headdim, None, 0.0
            given = (num_attention_heads, heads), (intermediate_size, mlp), (attention_probs_dropout_prob, dropout)
            names = "num_attention_heads", "intermediate_size", "attention_probs_dropout_prob"
            for name, (value, only) in zip(names, given):
                if value not in (None, only):
                    raise ValueError(f"hydra has {name}={only} at this size (got {value}); omit it, or set it to null")
        num_attention_heads = heads if num_attention_heads is None else num_attention_heads
        intermediate_size = mlp if intermediate_size is None else intermediate_size
        if attention_probs_dropout_prob is None:
            attention_probs_dropout_prob = dropout
        if mixer != "hydra" and hidden_size % num_attention_heads:
            raise ValueError(f"hidden_size={hidden_size} is not divisible by num_attention_heads={num_attention_heads}")
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
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def has_positions(self) -> bool:
        """Whether the mixer uses position embeddings."""
        # transformers loads a Hub folder's configuration without mixers.py, so the model there asks its mixer instead.
        return import_module(".mixers", __package__).MIXERS[self.mixer].has_positions

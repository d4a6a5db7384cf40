"""LION encoders: BERT (Devlin et al. 2018, post-LayerNorm) with linear attention in place of softmax attention.

Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249. What differs from
BERT is `LionAttention`; the rest is BERT's. Letters in shape comments: B batch, L length, D hidden, H heads, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from .configuration_lion import LionConfig
from .dropout import Dropout
from .linear import linear
from .linear_attention import PieceStates, attention_matrix, linear_attention, piece_states, sequence_begins
from .linear_attention_triton import AVAILABLE  # noqa: F401 - transformers takes along from a Hub folder what this file names

# What a layer does with each token alone, it does for so many at a time on a CPU when nothing is kept for a backward pass:
# 1,024 times 3,072 numbers stay in its cache, and memory of that size is used again instead of asked of the system anew.
_TOKENS_AT_A_TIME = 1024


class LionEmbeddings(nn.Module):
    """Word + segment (+ position, where the mixer has no decay) embeddings, LayerNorm, dropout."""

    def __init__(self, config: LionConfig):
        super().__init__()
        D = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, D, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, D)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, D) if config.has_positions else None
        self.LayerNorm = nn.LayerNorm(D, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.mixer = config.mixer

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds  # (B, L, D)
        L = x.shape[1]
        if token_type_ids is None:
            x = x + self.token_type_embeddings.weight[0]
        else:
            x = x + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(L, device=x.device)[None] if seq_idx is None else _positions(seq_idx)
                if L > self.position_embeddings.num_embeddings:  # packed sequences may each be short enough
                    self.check_length(int(position_ids.max()) + 1)
            x = x + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x))

    def check_length(self, length: int) -> None:
        """Raise ValueError for a text longer than the position table, where there is one."""
        longest = length if self.position_embeddings is None else self.position_embeddings.num_embeddings
        if longest < length:
            raise ValueError(
                f"{length} tokens, but {self.mixer} has a table of {longest} positions (max_position_embeddings); "
                "shorten the text, or use lion-d or lion-s, which need no positions"
            )


def _positions(seq_idx: Tensor) -> Tensor:
    """0, 1, 2 … from the start of each packed sequence, (B, L)."""
    places = torch.arange(seq_idx.shape[1], device=seq_idx.device)
    return places - torch.where(sequence_begins(seq_idx), places, 0).cummax(1).values


class LionAttention(nn.Module):
    """Linear attention with the mixer's decay (λ = 1, λ = σ(α_h), or λ = σ(−(w_h·x_t + b_h))), or softmax."""

    def __init__(self, config: LionConfig):
        super().__init__()
        D = config.hidden_size
        self.config = config
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(D, 3 * D)
        if config.mixer == "lion-d":
            self.decay = nn.Parameter(torch.randn(self.num_heads))
        elif config.mixer == "lion-s":
            self.decay = nn.Linear(D, self.num_heads)
        elif config.mixer == "lion-lit":
            self.norm = nn.LayerNorm(D)
        self.out = nn.Linear(D, D)

    def log_decay(self, x: Tensor) -> Tensor | None:
        """log λ in float32: None, (H,) or (B, H, L), by mixer."""
        if self.config.mixer == "lion-d":
            return F.logsigmoid(self.decay.float())
        if self.config.mixer == "lion-s":
            return F.logsigmoid(-self.decay(x).float()).mT
        return None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, H, L, D/H)."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in linear(self.qkv, x).chunk(3, -1))
        return q, k, v

    def piece_states(self, x: Tensor, mask: Tensor | None) -> PieceStates:
        """What a piece of a text, (B, L, D), passes on to the others."""
        _, k, v = self.project(x)
        return piece_states(k, v, self.log_decay(x), mask=mask)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        seq_idx: Tensor | None,
        form: str,
        output_attentions: bool = False,
        left_state: Tensor | None = None,
        right_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, side by side, (B, L, D), and the matrix if asked for, (B, H, L, L)."""
        q, k, v = self.project(x)
        dropout_p = self.config.attention_probs_dropout_prob if self.training else 0.0
        matrix = None
        if self.config.mixer == "softmax":
            allowed = _allowed_keys(mask, seq_idx)  # (B, 1, L or 1, L)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout_p)
            if output_attentions:
                scores = q @ k.mT * q.shape[-1] ** -0.5
                matrix = (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)
        else:
            log_decay = self.log_decay(x)
            y = linear_attention(
                q, k, v, log_decay, mask=mask, seq_idx=seq_idx, left_state=left_state, right_state=right_state,
                form=form, chunk_size=self.config.chunk_size, dropout_p=dropout_p,
            )  # fmt: skip
            if output_attentions:
                matrix = attention_matrix(q, k, log_decay, mask=mask, seq_idx=seq_idx)
        return y.transpose(1, 2).reshape(x.shape), matrix

    def project_out(self, y: Tensor) -> Tensor:
        """From the heads' outputs, side by side, (..., D), to the layer's."""
        return linear(self.out, self.norm(y) if self.config.mixer == "lion-lit" else y)


def _allowed_keys(mask: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Which keys a query of softmax attention may see, (B, 1, L or 1, L): real ones, of its own sequence."""
    allowed = None if mask is None else mask[:, None, None, :]
    if seq_idx is not None:
        number = sequence_begins(seq_idx).cumsum(1)
        same = number[:, None, :, None] == number[:, None, None, :]
        allowed = same if allowed is None else same & allowed
    return allowed


class LionLayer(GradientCheckpointingLayer):
    """Attention, then a GELU MLP, each followed by dropout, the residual sum and a LayerNorm."""

    def __init__(self, config: LionConfig):
        super().__init__()
        self.attention = LionAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp_in = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.mlp_out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        seq_idx: Tensor | None,
        form: str,
        output_attentions: bool = False,
        left_state: Tensor | None = None,
        right_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        y, matrix = self.attention(x, mask, seq_idx, form, output_attentions, left_state, right_state)
        if not self._is_cut(x):
            return self.after_mixing(x, y), matrix
        output = x.new_empty(x.shape)
        pieces = (z.flatten(0, 1).split(_TOKENS_AT_A_TIME) for z in (output, x, y))
        for output_piece, x_piece, y_piece in zip(*pieces):
            output_piece.copy_(self.after_mixing(x_piece, y_piece))
        return output, matrix

    def _is_cut(self, x: Tensor) -> bool:
        """Whether x's tokens, (B, L, D), go through `after_mixing` a part at a time. Dropout would draw in another order than
        when a checkpoint computes this again, and hooks are made for whole activations."""
        return (
            not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
            and x.device.type == "cpu"
            and x.shape[0] * x.shape[1] > _TOKENS_AT_A_TIME
            and not any(module._forward_hooks or module._forward_pre_hooks for module in self.modules())
        )

    def after_mixing(self, x: Tensor, y: Tensor) -> Tensor:
        """What a layer does with each token alone, after its heads have mixed x into y, (..., D): (..., D)."""
        x = self.attention_norm(x + self.dropout(self.attention.project_out(y)))
        return self.mlp_norm(x + self.dropout(linear(self.mlp_out, self.act(linear(self.mlp_in, x)))))


class LionMLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the word embeddings once more as the output matrix, and a bias."""

    def __init__(self, config: LionConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.act(self.dense(x))))  # (..., V)


class LionPreTrainedModel(PreTrainedModel):
    """Initial weights and what transformers wants to know of a model."""

    config_class = LionConfig
    base_model_prefix = "lion"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LionLayer"]
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
            if getattr(module, "padding_idx", None) is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LionAttention) and self.config.mixer == "lion-d":
            nn.init.normal_(module.decay)


class LionModel(LionPreTrainedModel):
    """The encoder: token ids to hidden states. The pooler is what classification reads: first token or mean, dense, tanh."""

    def __init__(self, config: LionConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = LionEmbeddings(config)
        self.layers = nn.ModuleList(LionLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """Encode a batch of texts.

        Args:
            input_ids: (B, L) token ids; or `inputs_embeds`, (B, L, D), in their place.
            attention_mask: (B, L), 1 or True at real tokens; all are real when None.
            token_type_ids, position_ids: (B, L); 0, and 0 … L−1, when None. Positions matter to lion-lit and softmax alone.
            output_attentions: also return each layer's matrix, (B, H, L, L): s·QKᵀ⊙M, or softmax's probabilities.
            attention_form: the operator's form for this call, in place of the configuration's.
            seq_idx: (B, L) integers, the number of the sequence that a token belongs to in a row packed with several; each
                is encoded as if alone. See `linear_attention`.

        Raises:
            ValueError: neither or both of input_ids and inputs_embeds; a text longer than the position table; the matrix
                asked of a form that has none.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config = self.config
        form = attention_form or config.attention_form
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = config.return_dict if return_dict is None else return_dict
        if output_attentions and config.mixer != "softmax" and form in ("recurrent", "chunkwise"):
            raise ValueError(f"the {form} form never has the attention matrix; ask for it with attention_form='full'")

        mask = None if attention_mask is None else attention_mask.bool()
        x = self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids, seq_idx)
        hidden_states, attentions = [x] if output_hidden_states else [], []
        for layer in self.layers:
            x, matrix = layer(x, mask, seq_idx, form, output_attentions)
            if output_hidden_states:
                hidden_states.append(x)
            attentions.append(matrix)
        output = BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else torch.tanh(self.pooler(self._pooled(x, mask))),
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()

    @torch.no_grad()
    def encode_long(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        piece_length: int = 8192,
        attention_form: str | None = None,
    ) -> Tensor:
        """Encode texts whose activations do not fit in memory at once, in pieces of `piece_length` tokens, for inference.

        In each layer the pieces are read from left to right, which leaves the state in which each finds all earlier ones,
        and then from right to left with the state of all later ones, which gives each piece its output. The result is
        what one call gives; memory holds the hidden states of the text, where `input_ids` lie (best in the CPU's
        memory), and all else of one piece on the model's device.

        Args:
            input_ids, attention_mask, token_type_ids: (B, L), and attention_form, as in a call.

        Returns:
            (B, L, D), the last hidden state, on the device of `input_ids`.

        Raises:
            ValueError: softmax attention, which has no states; training mode; a text longer than the position table.
        """
        if self.config.mixer == "softmax":
            raise ValueError(
                "softmax attention has no states to hand from piece to piece; encode_long needs a lion mixer"
            )
        if self.training:
            raise ValueError("encode_long is for inference; call model.eval() first")
        self.embeddings.check_length(input_ids.shape[1])
        form = attention_form or self.config.attention_form
        device = self.device
        L = input_ids.shape[1]
        pieces = [slice(start, min(start + piece_length, L)) for start in range(0, L, piece_length)]

        def piece_of(x: Tensor | None, piece: slice) -> Tensor | None:
            return None if x is None else x[:, piece].to(device)

        x = torch.empty(*input_ids.shape, self.config.hidden_size, dtype=self.dtype, device=input_ids.device)
        for piece in pieces:
            position_ids = torch.arange(piece.start, piece.stop, device=device)[None]
            x[:, piece] = self.embeddings(piece_of(input_ids, piece), None, piece_of(token_type_ids, piece), position_ids).to(x.device)  # fmt: skip
        mask = None if attention_mask is None else attention_mask.bool()
        for layer in self.layers:
            states = [layer.attention.piece_states(piece_of(x, piece), piece_of(mask, piece)) for piece in pieces]
            lefts = [torch.zeros_like(states[0].rightward)]
            for state in states[:-1]:
                lefts.append(lefts[-1] * state.across + state.rightward)
            right = torch.zeros_like(lefts[0])
            for piece, left, state in reversed(list(zip(pieces, lefts, states))):
                y, _ = layer(piece_of(x, piece), piece_of(mask, piece), None, form, False, left, right)
                x[:, piece] = y.to(x.device)
                right = right * state.across + state.leftward
        return x

    def _pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The first token, or the mean of the real ones, (B, D)."""
        if self.config.classifier_pooling == "cls":
            return x[:, 0]
        if mask is None:
            return x.mean(1)
        wide = torch.promote_types(x.dtype, torch.float32)  # float16 holds no sum of a long text
        return ((x * mask[..., None]).sum(1, dtype=wide) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


class LionForMaskedLM(LionPreTrainedModel):
    """The encoder with a masked-language-model head."""

    _tied_weights_keys = {"head.decoder.weight": "lion.embeddings.word_embeddings.weight"}

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, add_pooling_layer=False)
        self.head = LionMLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.head.decoder = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        seq_idx: Tensor | None = None,
        masked_positions: Tensor | None = None,
    ) -> MaskedLMOutput | tuple:
        """Predict masked tokens. Arguments as `LionModel`.

        Args:
            labels: (B, L), the token to predict, or -100 where none is. In training mode, logits are computed and returned
                for the labelled positions alone, (labels that are not -100, V) in reading order: the head costs a third of a base model.
            masked_positions: (labels that are not -100,), where these stand in the flattened labels, if that is known: a GPU
                has to be waited for to count them. (A name with "label" in it would be one to transformers' Trainer.)
        """
        return_dict = self.config.return_dict if return_dict is None else return_dict
        labelled = None
        if labels is not None and self.training:
            labelled = masked_positions
            if labelled is None:  # ahead of the encoder, while a GPU has little to finish
                labelled = labelled_positions(labels)
            labels = labels.flatten().index_select(0, labelled)
        output = self.lion(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            output_attentions, output_hidden_states, True, attention_form, seq_idx,
        )  # fmt: skip
        x = output.last_hidden_state
        if labelled is not None:
            x = x.flatten(0, 1).index_select(0, labelled)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = _cross_entropy(logits.flatten(0, -2), labels.flatten())
        result = MaskedLMOutput(loss, logits, output.hidden_states, output.attentions)
        return result if return_dict else result.to_tuple()


class LionForSequenceClassification(LionPreTrainedModel):
    """The encoder with a classification or regression head on the pooled first token."""

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.lion = LionModel(config)
        self.dropout = Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Classify texts. Arguments as `LionModel`.

        Args:
            labels: (B,) class numbers (cross entropy); (B,) floats when there is one label (squared error); (B, num_labels)
                of 0 and 1 when `config.problem_type` is "multi_label_classification" (binary cross entropy).
        """
        return_dict = self.config.return_dict if return_dict is None else return_dict
        output = self.lion(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            output_attentions, output_hidden_states, True, attention_form, seq_idx,
        )  # fmt: skip
        logits = self.classifier(self.dropout(output.pooler_output))  # (B, num_labels)
        loss = None
        if labels is not None:
            if self.config.problem_type == "multi_label_classification":
                loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float())
            elif self.num_labels == 1:
                loss = F.mse_loss(logits.squeeze(-1).float(), labels.flatten().float())
            else:
                loss = F.cross_entropy(logits.float(), labels.flatten())
        result = SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions)
        return result if return_dict else result.to_tuple()


class LionForTokenClassification(LionPreTrainedModel):
    """The encoder with a classification head on every token."""

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.lion = LionModel(config, add_pooling_layer=False)
        self.dropout = Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> TokenClassifierOutput | tuple:
        """Classify tokens. Arguments as `LionModel`; labels: (B, L) class numbers, -100 where none is."""
        return_dict = self.config.return_dict if return_dict is None else return_dict
        output = self.lion(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            output_attentions, output_hidden_states, True, attention_form, seq_idx,
        )  # fmt: skip
        logits = self.classifier(self.dropout(output.last_hidden_state))  # (B, L, num_labels)
        loss = None if labels is None else _cross_entropy(logits.flatten(0, 1), labels.flatten())
        result = TokenClassifierOutput(loss, logits, output.hidden_states, output.attentions)
        return result if return_dict else result.to_tuple()


class LionForQuestionAnswering(LionPreTrainedModel):
    """The encoder with a head that marks where an answer starts and ends."""

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> QuestionAnsweringModelOutput | tuple:
        """Find a span. Arguments as `LionModel`; start_positions, end_positions: (B,); outside the text they do not count."""
        return_dict = self.config.return_dict if return_dict is None else return_dict
        output = self.lion(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            output_attentions, output_hidden_states, True, attention_form, seq_idx,
        )  # fmt: skip
        start_logits, end_logits = self.qa_outputs(output.last_hidden_state).unbind(-1)  # each (B, L)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (_span_loss(start_logits, start_positions) + _span_loss(end_logits, end_positions)) / 2
        result = QuestionAnsweringModelOutput(loss, start_logits, end_logits, output.hidden_states, output.attentions)
        return result if return_dict else result.to_tuple()


def _span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    positions = positions.flatten()
    return _cross_entropy(logits, positions.masked_fill((positions < 0) | (positions >= logits.shape[1]), -100))


def labelled_positions(labels: Tensor) -> Tensor:
    """Where the labels that are not -100 stand in the flattened labels, (as many as there are,)."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that are not -100, in float32; 0 where there are none, where F.cross_entropy gives NaN."""
    return F.cross_entropy(logits.float(), labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def _classifier_dropout(config: LionConfig) -> float:
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout

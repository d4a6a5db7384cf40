"""LION encoders: BERT (Devlin et al. 2018, post-LayerNorm) whose mixer, see mixers.py, is linear attention (Afzal et
al. 2025, arXiv:2502.16249). Shape letters: B batch, L length, D hidden size, H heads, V vocabulary."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from .channel_decay import attend_by_channel  # noqa: F401
from .channel_kernel_source import CHANNELS  # noqa: F401
from .configuration_lion import DECAYING, LionConfig, check_choices
from .cpu import speed_up
from .cpu_crossover import full_is_faster  # noqa: F401
from .cpu_kernel import covers  # noqa: F401
from .cpu_kernel_source import SOURCE  # noqa: F401
from .cpu_linear import LinearLayers, is_hooked
from .custom_operators import operator  # noqa: F401
from .full_kernel_source import FULL  # noqa: F401
from .hydra_attention import hydra_attention  # noqa: F401
from .linear_attention import SegmentStates  # noqa: F401
from .linear_attention_forms import sequence_starts
from .linear_attention_native import full_forward  # noqa: F401
from .linear_attention_triton import fused_linear_attention  # noqa: F401
from .losses import classification_loss, cross_entropy, labelled_positions, span_loss
from .machine import choice  # noqa: F401
from .mixers import MIXERS, build_norm, rotation
from .patch_orders import snakes  # noqa: F401
from .pooling import pool_spans
from .triton_kernels import AVAILABLE  # noqa: F401
from .two_sided_attention import two_sided_attention  # noqa: F401

# All files are named here: transformers finds files through `from .file import` alone, and copies from a local folder
# what this file imports itself. Others import modules, since transformers 4 reads a file once per chain of imports.
MIN_SEGMENT = 2048  # tokens; shorter segments would be slower, not smaller


class LionEmbeddings(nn.Module):
    """Word + segment (+ position, if the mixer uses them) embeddings, LayerNorm, dropout."""

    def __init__(self, config: LionConfig):
        super().__init__()
        D, kind = config.hidden_size, config.position_embedding
        self.word_embeddings = nn.Embedding(config.vocab_size, D, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, D) if config.type_vocab_size else None
        learned = MIXERS[config.mixer].has_positions if kind is None else kind == "learned"
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, D) if learned else None
        self.LayerNorm = build_norm(config, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.mixer = config.mixer

    def forward(self, input_ids, inputs_embeds, token_type_ids, position_ids) -> Tensor:
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds  # (B, L, D)
        if (types := self.token_type_embeddings) is not None:
            x = x + types(position_ids.new_zeros(1, 1) if token_type_ids is None else token_type_ids)
        if self.position_embeddings is not None:
            if x.shape[1] > self.position_embeddings.num_embeddings:  # packed sequences may each be short enough
                self.check_length(int(position_ids.max()) + 1)
            x = x + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x))

    def check_length(self, length: int) -> None:
        """Raise ValueError for a text longer than the position embeddings, if there are any."""
        longest = length if self.position_embeddings is None else self.position_embeddings.num_embeddings
        if longest < length:
            limit = f"{self.mixer} with {longest} position embeddings (max_position_embeddings)"
            raise ValueError(f"{length} tokens are too many for {limit}; shorten the text or use a model without them")


class MixerLayer(LinearLayers, GradientCheckpointingLayer):
    """A mixer, the residual sum and a norm: a layer of Hydra."""

    layer_norm_eps = 1e-5

    def __init__(self, config: LionConfig, is_first: bool = False):
        super().__init__()
        self.attention = MIXERS[config.mixer](config)
        self.pre_norm = config.norm == "pre"
        eps = self.layer_norm_eps or config.layer_norm_eps
        self.attention_norm = nn.Identity() if self.pre_norm and is_first else build_norm(config, eps)

    def forward(self, x, mask, seq_idx, form, output_attentions=False, halo=(0, 0), **options):
        """Return the layer's output, (B, L, D), and the attention matrix, (B, H, L, L), if requested."""
        if self.attention.has_states and torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
            raise RuntimeError("torch.onnx's tracing exporter cannot record linear attention: use torch.export")
        y, matrix = self.attention(self.before_mixing(x), mask, seq_idx, form, output_attentions, halo=halo, **options)
        return self.after_mixing(x[:, halo[0] : x.shape[1] - halo[1]] if any(halo) else x, y), matrix

    def before_mixing(self, x: Tensor) -> Tensor:
        """Compute the mixer's input."""
        return self.attention_norm(x) if self.pre_norm else x

    def after_mixing(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the layer's output from its input x and what was mixed, y, for each token on its own."""
        x = x + self.attention.project_out(y)
        return x if self.pre_norm else self.attention_norm(x)


class LionLayer(MixerLayer):
    """A mixer, then an MLP, each followed by dropout, the residual sum and a norm; or preceded by the norm."""

    layer_norm_eps = None  # the configuration's

    def __init__(self, config: LionConfig, is_first: bool = False):
        super().__init__(config, is_first)
        self.gated, width = config.mlp == "geglu", config.intermediate_size
        self.mlp_in = nn.Linear(config.hidden_size, 2 * width if self.gated else width, bias=config.bias)
        self.act = ACT2FN[config.hidden_act]
        self.mlp_out = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.mlp_norm = build_norm(config, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def after_mixing(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.dropout(self.attention.project_out(y))
        if self.pre_norm:
            x = x + y
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x + y)
        return self.mlp_norm(x + self.dropout(self.mlp(x)))

    def mlp(self, x: Tensor) -> Tensor:
        x = self.linear(self.mlp_in, x)
        if self.gated:
            x, gate = x.chunk(2, -1)
            return self.linear(self.mlp_out, self.act(x) * gate)
        return self.linear(self.mlp_out, self.act(x))


class LionMLMHead(LinearLayers, nn.Module):
    """Dense, GELU, norm, then the word embeddings as the output matrix, and a bias."""

    def __init__(self, config: LionConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.act = ACT2FN[config.hidden_act]
        self.norm = build_norm(config, config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.decoder, self.norm(self.act(self.linear(self.dense, x))))  # (..., V)


class LionPreTrainedModel(PreTrainedModel):
    """Initial weights, and what transformers needs to know about a model."""

    config_class = LionConfig
    base_model_prefix = "lion"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LionLayer", "MixerLayer"]
    _supports_sdpa = True

    def __init__(self, config: LionConfig, *args, **kwargs):
        check_choices(vars(config))  # which from_pretrained(..., attention_form=...) changes after its own check
        super().__init__(config, *args, **kwargs)

    def returns_dict(self, given: bool | None) -> bool:
        """Whether to return outputs by name: as given, or as configured, and not where a tracer expects tuples."""
        by_default = self.config.return_dict and not getattr(self.config, "torchscript", False)
        return by_default if given is None else given

    def post_init(self) -> None:
        super().post_init()
        speed_up(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            self._draw(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
            if hasattr(module, "initial_bias"):
                module.bias.copy_(torch.tensor(module.initial_bias))
            if getattr(module, "padding_idx", None) is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv1d):  # a short convolution starts as the identity
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.weight[..., module.kernel_size[0] // 2])
        elif hasattr(module, "init_parameters"):  # transformers 5 omits mixers without parameters of their own
            module.init_parameters()

    def _draw(self, weight: Tensor) -> None:
        """Draw the initial weights of a linear layer or of embeddings."""
        nn.init.normal_(weight, std=self.config.initializer_range)

    def _run_layers(self, x: Tensor, run: Callable, output_hidden_states: bool = False):
        """Pass x through each layer by `run(layer, x)`. Return the last state, all if requested, and the matrices."""
        hidden_states, matrices = (x,) if output_hidden_states else None, ()
        for layer in self.layers:
            x, matrix = run(layer, x)
            matrices += (matrix,)
            if output_hidden_states:
                hidden_states += (x,)
        return x, hidden_states, matrices


class LionModel(LionPreTrainedModel):
    """The encoder: token ids to hidden states. The pooler, for classification: first token or mean, dense, tanh."""

    # From a Hub folder: so that save_pretrained copies this code, also for the encoder of a headed model.
    _auto_class = "AutoModel" if __name__.startswith("transformers_modules.") else None
    state_passing = 0.0

    def __init__(self, config: LionConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = LionEmbeddings(config)
        layer = LionLayer if MIXERS[config.mixer].has_mlp else MixerLayer
        self.layers = nn.ModuleList(layer(config, is_first=number == 0) for number in range(config.num_hidden_layers))
        self.final_norm = build_norm(config, config.layer_norm_eps) if config.norm == "pre" else None
        D = config.hidden_size
        self.pooler = nn.Linear(D, D, bias=config.bias) if add_pooling_layer else None
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
    ) -> modeling_outputs.BaseModelOutputWithPooling | tuple:
        """Encode a batch of texts: last_hidden_state, (B, L, D), and pooler_output, (B, D), None without a pooler.

        Args:
            input_ids: (B, L) token ids; or `inputs_embeds`, (B, L, D), instead.
            attention_mask: (B, L), 1 or True at real tokens; None if all are real.
            token_type_ids, position_ids: (B, L); 0, and 0 … L−1, if None. Positions serve learned embeddings and rope.
            output_attentions: also return each layer's matrix, (B, H, L, L): s·QKᵀ⊙M, or softmax's probabilities.
            attention_form: the operator's form for this call, overriding the configuration.
            seq_idx: (B, L) integers, the sequence that each token of a packed row belongs to, see `linear_attention`;
                each sequence is encoded as if alone.

        Raises ValueError for both or neither of input_ids and inputs_embeds, other shapes, a text longer than the
        position embeddings, the matrix of a form that has none, or packed rows that would pass states.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens, rank = (input_ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
        if tokens.ndim != rank:
            wanted = "input_ids must be (batch, length), and inputs_embeds (batch, length, hidden_size)"
            raise ValueError(f"{wanted} (got {tuple(tokens.shape)})")
        if attention_mask is not None and attention_mask.shape != tokens.shape[:2]:
            wanted = f"attention_mask must be {tuple(tokens.shape[:2])}, as the texts are"
            raise ValueError(f"{wanted} (got {tuple(attention_mask.shape)})")
        config, form = self.config, attention_form or self.config.attention_form
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = self.returns_dict(return_dict)
        mask = None if attention_mask is None else attention_mask.bool()
        plain = position_ids is None and inputs_embeds is None and seq_idx is None
        plain = plain and not (output_attentions or output_hidden_states)
        if plain and (size := self._segment_length(input_ids)) is not None:
            x = self.encode_long(input_ids, mask, token_type_ids, segment_length=size, attention_form=form)
            pooled = None if self.pooler is None else torch.tanh(self.pooler(self._pooled(x, mask)))
            output = modeling_outputs.BaseModelOutputWithPooling(x, pooled)
            return output if return_dict else output.to_tuple()
        if position_ids is None:
            position_ids = positions(0, tokens.shape[1], tokens.device, seq_idx)
        options = {"rotation": self._rotation(position_ids)}
        x = self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids)
        if self.training and self.state_passing:
            options["donors"] = self._draw_donors(x, seq_idx)
        layer_mask, prepared = MIXERS[config.mixer].prepare(config, x, mask, seq_idx)
        x, hidden_states, matrices = self._run_layers(
            x,
            lambda layer, x: layer(x, layer_mask, seq_idx, form, output_attentions, **options, **prepared),
            output_hidden_states,
        )
        if self.final_norm is not None:
            x = self.final_norm(x)
            hidden_states = hidden_states and (*hidden_states[:-1], x)
        matrices = matrices if output_attentions else None
        pooled = None if self.pooler is None else torch.tanh(self.pooler(self._pooled(x, mask)))
        output = modeling_outputs.BaseModelOutputWithPooling(x, pooled, hidden_states, matrices)
        return output if return_dict else output.to_tuple()

    def set_state_passing(self, probability: float) -> None:
        """In training, give each text, with this probability, the final states of another text of the batch, without
        gradients, as if that text stood on both sides of it. So a model learns from short texts what the states of long
        ones are like (arXiv:2507.02782, for models that read in one direction). A batch of one has no other text.
        Raises ValueError for a mixer without states, or for position embeddings, which would give both texts the same
        positions."""
        config = self.config
        if not 0 <= probability <= 1:
            raise ValueError(f"state_passing must be from 0 to 1 (got {probability})")
        if probability and not MIXERS[config.mixer].has_states:
            raise ValueError(f"{config.mixer} has no states to pass; set state_passing=0, or use a lion mixer or hydra")
        if probability and (self.embeddings.position_embeddings is not None or config.position_embedding == "rope"):
            problem = f"{config.mixer} with position embeddings cannot pass states"
            raise ValueError(f"{problem}; set position_embedding=none or state_passing=0")
        self.state_passing = probability

    def _draw_donors(self, x: Tensor, seq_idx: Tensor | None) -> Tensor | None:
        """Draw whose states each text gets, (B,); −1: none."""
        if seq_idx is not None:
            raise ValueError("state passing needs one text per row; omit seq_idx")
        count, device = len(x), x.device
        if count == 1:
            return None
        distance = torch.randint(1, count, (1,), device=device)
        donors = (torch.arange(count, device=device) + distance) % count
        return donors.masked_fill(torch.rand(count, device=device) >= self.state_passing, -1)

    def _segment_length(self, input_ids: Tensor) -> int | None:
        """The length of the segments in which inference reads long texts, (B, L), or None to read them whole."""
        if torch.compiler.is_compiling() or self.training or torch.is_grad_enabled():
            return None
        if input_ids.shape[1] <= self.config.segment_length or not MIXERS[self.config.mixer].has_states:
            return None
        # FSDP, 1 and 2, and hooks of accelerate gather weights in whole calls only, and other hooks expect whole texts.
        gathered = any(hasattr(x, "device_mesh") for x in self.parameters())
        if gathered or any(is_hooked(x) for x in self.modules() if x is not self):
            return None
        if not all(isinstance(layer, MixerLayer) for layer in self.layers):
            return None
        return max(self.config.segment_length // len(input_ids), MIN_SEGMENT)

    @torch.no_grad()
    def widen_horizons(self) -> None:
        """Widen the horizons, measured on random tokens, of the slower half of each layer's heads to `decay_horizon`,
        for a trained model that is to read longer texts. Raises ValueError unless it is a lion-d or lion-s with one."""
        config = self.config
        if config.mixer not in DECAYING or config.decay_horizon is None or config.channel_decays:
            raise ValueError("only lion-d and lion-s with a decay_horizon, one per head, have horizons to widen")
        generator = torch.Generator("cpu").manual_seed(0)
        table = self.embeddings.position_embeddings
        length = 128 if table is None else min(128, table.num_embeddings)
        ids = torch.randint(config.vocab_size, (8, length), generator=generator, device="cpu").to(self.device)
        position_ids = positions(0, ids.shape[1], self.device)
        rotation = self._rotation(position_ids)

        def run(layer: MixerLayer, x: Tensor) -> tuple[Tensor, None]:
            layer.attention.widen(layer.before_mixing(x))
            return layer(x, None, None, "auto", rotation=rotation)

        training = self.training
        self.eval()
        self._run_layers(self.embeddings(ids, None, None, position_ids), run)
        self.train(training)

    def _rotation(self, position_ids: Tensor) -> Tensor | None:
        """The rotation of q and k at these positions, if they are rotated; see mixers.py."""
        config = self.config
        if config.position_embedding != "rope":
            return None
        return rotation(position_ids, config.hidden_size // config.num_attention_heads, config.rope_theta)

    @torch.no_grad()
    def encode_long(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        segment_length: int = 8192,
        attention_form: str | None = None,
        piece_length: int | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        storage: str | os.PathLike | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Encode texts whose activations do not fit in memory, in segments of `segment_length` tokens, for inference.

        Each layer reads the segments from left to right for the state of all earlier ones, then from right to left with
        the state of all later ones, and so computes each segment's output. The result equals that of one call. Hidden
        states stay on the device of `input_ids` (preferably the CPU); all else, for one segment, is on the model's.

        Args:
            input_ids, attention_mask, token_type_ids: (B, L), as in a call; likewise attention_form.
            piece_length: the earlier name of segment_length.
            spans: (start, stop) of passages of a single text, in tokens.
            storage: a file to keep hidden states in, memory-mapped, if they do not fit in memory; it is overwritten.
        Returns:
            (B, L, D), the last hidden state, on the device of `input_ids`; or, with spans, their mean vectors,
            (spans, D), and weights, (spans,), see `pool_spans`.
        Raises ValueError for a mixer without states, training mode, an empty text or one longer than the position
        embeddings, or spans of several texts.
        """
        if not MIXERS[self.config.mixer].has_states:
            raise ValueError(f"{self.config.mixer} has no states to pass between segments; use a lion mixer or hydra")
        if self.training:
            raise ValueError("encode_long is for inference; call model.eval() first")
        if spans is not None and len(input_ids) != 1:
            raise ValueError(f"spans are of a single text, and this is a batch of {len(input_ids)}; pass one at a time")
        L, device, size = input_ids.shape[1], self.device, piece_length or segment_length
        if min(L, size) < 1:
            raise ValueError(f"encode_long needs at least one token, and segments of one (got {L} and {size})")
        self.embeddings.check_length(L)
        form = attention_form or self.config.attention_form
        mask = None if attention_mask is None else attention_mask.bool()
        segments = [slice(start, min(start + size, L)) for start in range(0, L, size)]

        def take(x: Tensor | None, segment: slice) -> Tensor | None:
            return None if x is None else x[:, segment].to(device)

        def places(segment: slice) -> Tensor:
            return positions(segment.start, segment.stop, device)

        def run(layer: MixerLayer, x: Tensor) -> tuple[Tensor, None]:
            size = layer.attention.halo
            halos = [(min(size, segment.start), min(size, L - segment.stop)) for segment in segments]
            wide = [slice(part.start - left, part.stop + right) for part, (left, right) in zip(segments, halos)]
            passed = []
            for segment, part, halo in zip(segments, wide, halos):
                inputs, angles = layer.before_mixing(take(x, part)), self._rotation(places(segment))
                passed.append(layer.attention.segment_states(inputs, take(mask, part), halo, angles))
            lefts = [torch.zeros_like(passed[0].rightward)]
            for state in passed[:-1]:
                lefts.append(lefts[-1] * state.across + state.rightward)
            right = torch.zeros_like(lefts[0])
            following = x[:, L:].to(device)  # the next tokens, as many as a halo has, before they were overwritten
            for segment, part, halo, left, state in reversed(list(zip(segments, wide, halos, lefts, passed))):
                inputs = x[:, part.start : segment.stop].to(device)
                if size:
                    inputs = torch.cat([inputs, following], 1)
                    following = inputs[:, halo[0] : halo[0] + size]
                states = {"left_state": left, "right_state": right}
                states["rotation"] = self._rotation(places(segment))
                x[:, segment], _ = layer(inputs, take(mask, part), None, form, halo=halo, **states)
                right = right * state.across_leftward + state.leftward
            return x, None

        shape = (*input_ids.shape, self.config.hidden_size)
        if storage is None:
            x = torch.empty(shape, dtype=self.dtype, device=input_ids.device)
        else:
            x = torch.from_file(str(storage), shared=True, size=math.prod(shape), dtype=self.dtype).view(shape)
        for segment in segments:
            types = take(token_type_ids, segment)
            x[:, segment] = self.embeddings(take(input_ids, segment), None, types, places(segment))
        x = self._run_layers(x, run)[0]
        if self.final_norm is not None:
            for segment in segments:
                x[:, segment] = self.final_norm(take(x, segment))
        return x if spans is None else pool_spans(x[0], spans)

    def _pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The first real token, or the mean of the real ones, (B, D)."""
        if self.config.classifier_pooling == "cls":
            return x[:, 0] if mask is None else x[torch.arange(x.shape[0], device=x.device), mask.long().argmax(1)]
        if mask is None:
            return x.mean(1)
        wide = torch.promote_types(x.dtype, torch.float32)  # the sum over a long text would overflow float16
        return ((x * mask[..., None]).sum(1, dtype=wide) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


def positions(start: int, stop: int, device: torch.device, seq_idx: Tensor | None = None) -> Tensor:
    """The positions of tokens, (B or 1, L), from the start of each packed sequence."""
    position_ids = torch.arange(start, stop, device=device)[None]
    if seq_idx is not None:
        position_ids = position_ids - (position_ids * sequence_starts(seq_idx)).cummax(1).values
    return position_ids


def _head_forward(method: Callable[..., ModelOutput]) -> Callable[..., ModelOutput | tuple]:
    """Turn `method(self, encode, *targets)`, which computes a head's output, into the forward of its model. `encode()`
    runs the encoder. The forward takes the arguments of `LionModel.forward`, with the targets after inputs_embeds,
    except those declared keyword-only, which come last."""
    encoder = list(inspect.signature(LionModel.forward).parameters.values())
    targets = list(inspect.signature(method).parameters.values())[2:]
    last = [x.replace(kind=x.POSITIONAL_OR_KEYWORD) for x in targets if x.kind == x.KEYWORD_ONLY]
    signature = inspect.Signature([*encoder[:6], *targets[: len(targets) - len(last)], *encoder[6:], *last])
    names, of_head = list(signature.parameters)[1:], [x.name for x in targets]

    @functools.wraps(method)
    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"forward() takes at most {len(names)} inputs ({len(args)} given)")
        given = dict(**dict(zip(names, args)), **kwargs)
        head_inputs = {name: given.pop(name, None) for name in of_head}
        return_dict = given.pop("return_dict", None)
        output = method(self, lambda: self.lion(**given, return_dict=True), **head_inputs)
        return output if self.returns_dict(return_dict) else output.to_tuple()

    forward.__signature__ = signature  # which transformers and Composer read
    return forward


class HeadedModel(LionPreTrainedModel):
    """The encoder, `lion`, and what a subclass adds in `add_head`."""

    has_pooler = False

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, self.has_pooler)
        self.add_head(config)
        self.post_init()


class LionForMaskedLM(HeadedModel):
    """The encoder with a masked-language-model head."""

    _tied_weights_keys = {"head.decoder.weight": "lion.embeddings.word_embeddings.weight"}

    def add_head(self, config: LionConfig) -> None:
        self.head = LionMLMHead(config)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.head.decoder = value

    @_head_forward
    def forward(self, encode: Callable, labels: Tensor | None = None, *, masked_positions: Tensor | None = None):
        """Predict masked tokens. Other arguments: `LionModel.forward`.

        Args:
            labels: (B, L), the token to predict, or -100. In training mode, logits are computed and returned only at
                labels that are not -100, (labels, V) in reading order: the head costs a third of a base model.
            masked_positions: (labels,), their positions in the flattened labels, if known: finding them has to wait
                for the GPU. (transformers' Trainer would treat an argument with "label" in its name as labels.)
        """
        labelled = None
        if labels is not None and self.training:  # before the encoder, while a GPU has little queued
            labelled = labelled_positions(labels) if masked_positions is None else masked_positions
            labels = labels.flatten().index_select(0, labelled)
        output = encode()
        x = output.last_hidden_state
        if labelled is not None:
            x = x.flatten(0, 1).index_select(0, labelled)
        logits = self.head(x)
        loss = None if labels is None else cross_entropy(logits.flatten(0, -2), labels.flatten())
        return modeling_outputs.MaskedLMOutput(loss, logits, output.hidden_states, output.attentions)


class _Classifier(HeadedModel):
    """Dropout and a linear layer on the encoder."""

    def add_head(self, config: LionConfig) -> None:
        self.num_labels = config.num_labels
        p = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(p)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)


class LionForSequenceClassification(_Classifier):
    """The encoder with a classification or regression head on the pooler."""

    has_pooler = True

    @_head_forward
    def forward(self, encode: Callable, labels: Tensor | None = None):
        """Classify texts. Other arguments: `LionModel.forward`; labels: (B,) class indices, or (B, num_labels), see
        `classification_loss`."""
        output = encode()
        logits = self.classifier(self.dropout(output.pooler_output))  # (B, num_labels)
        loss = None if labels is None else classification_loss(self.config, logits, labels)
        return modeling_outputs.SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions)


class LionForTokenClassification(_Classifier):
    """The encoder with a classification head on every token."""

    @_head_forward
    def forward(self, encode: Callable, labels: Tensor | None = None):
        """Classify tokens. Other arguments: `LionModel.forward`; labels: (B, L) class indices, or -100."""
        output = encode()
        logits = self.classifier(self.dropout(output.last_hidden_state))  # (B, L, num_labels)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return modeling_outputs.TokenClassifierOutput(loss, logits, output.hidden_states, output.attentions)


class LionForQuestionAnswering(HeadedModel):
    """The encoder with a head that marks where an answer starts and ends."""

    def add_head(self, config: LionConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @_head_forward
    def forward(self, encode: Callable, start_positions: Tensor | None = None, end_positions: Tensor | None = None):
        """Find a span. Other arguments: `LionModel.forward`; start and end: (B,), ignored outside the text."""
        output = encode()
        logits = self.qa_outputs(output.last_hidden_state).unbind(-1)  # of starts and of ends, (B, L) each
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = sum(map(span_loss, logits, (start_positions, end_positions))) / 2
        return modeling_outputs.QuestionAnsweringModelOutput(loss, *logits, output.hidden_states, output.attentions)

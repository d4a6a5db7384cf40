"""LION image encoders: ViT (Dosovitskiy et al., arXiv:2010.11929) with linear attention in place of softmax attention.
Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249. What differs from ViT
is the mixer, see mixers.py, and the orders in which patches are read, see patch_orders.py. Shape letters: B batch,
C channels, D hidden size, L tokens, P patch size, h × w grid of patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import modeling_outputs
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.utils import ModelOutput

from .channel_decay import attend_by_channel  # noqa: F401
from .channel_kernel_source import CHANNELS  # noqa: F401
from .configuration_lion import LionVisionConfig
from .cpu import speed_up  # noqa: F401
from .cpu_crossover import full_is_faster  # noqa: F401
from .cpu_kernel import covers  # noqa: F401
from .cpu_kernel_source import SOURCE  # noqa: F401
from .cpu_linear import linear  # noqa: F401
from .custom_operators import operator  # noqa: F401
from .full_kernel_source import FULL  # noqa: F401
from .hydra_attention import hydra_attention  # noqa: F401
from .linear_attention import SegmentStates  # noqa: F401
from .linear_attention_forms import sequence_starts  # noqa: F401
from .linear_attention_native import full_forward  # noqa: F401
from .linear_attention_triton import fused_linear_attention  # noqa: F401
from .losses import classification_loss
from .machine import choice  # noqa: F401
from .mixers import MIXERS  # noqa: F401
from .modeling_lion import LionLayer, LionPreTrainedModel
from .patch_orders import snakes
from .pooling import pool  # noqa: F401
from .triton_kernels import AVAILABLE  # noqa: F401
from .two_sided_attention import two_sided_attention  # noqa: F401

# Unused imports are here because transformers copies from a local Hub folder only what this file imports itself.

# In transformers 4, pipeline() loads an image processor only for configurations listed here; a folder names its class.
if int(transformers.__version__.partition(".")[0]) < 5:
    IMAGE_PROCESSOR_MAPPING.register(LionVisionConfig, (None, None), exist_ok=True)


class LionImageEmbeddings(nn.Module):
    """Patches as tokens in raster order, behind a class token, and a distillation token if configured; with learned
    position embeddings if configured."""

    def __init__(self, config: LionVisionConfig):
        super().__init__()
        D, (height, width) = config.hidden_size, config.grid
        self.config = config
        self.projection = nn.Conv2d(config.num_channels, D, config.patch_size, config.patch_size)
        self.class_token = nn.Parameter(torch.zeros(D))
        self.distillation_token = nn.Parameter(torch.zeros(D)) if config.distillation_token else None
        tokens = config.num_prefix_tokens + height * width
        self.position_embeddings = nn.Embedding(tokens, D) if config.has_positions else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def init_parameters(self) -> None:
        self.projection.reset_parameters()
        for token in (self.class_token, self.distillation_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=self.config.initializer_range)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map images, (B, C, h·P, w·P), to tokens, (B, L, D)."""
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))  # (B, D, h, w)
        prefix = [token for token in (self.class_token, self.distillation_token) if token is not None]
        prefix = torch.stack(prefix).to(patches.dtype).expand(patches.shape[0], -1, -1)
        x = torch.cat([prefix, patches.flatten(2).mT], 1)
        if self.position_embeddings is not None:
            x = x + self.positions(*patches.shape[2:]).to(x.dtype)
        return self.dropout(x)

    def positions(self, height: int, width: int) -> Tensor:
        """The position embeddings of a grid of patches, (L, D), resized bicubically if it is not the configured one."""
        weight, grid, prefix = self.position_embeddings.weight, self.config.grid, self.config.num_prefix_tokens
        return resize_positions(weight, grid, (height, width), prefix)


def resize_positions(weight: Tensor, grid: tuple[int, int], to: tuple[int, int], prefix: int) -> Tensor:
    """Resize position embeddings, (prefix + patches of `grid`, D), bicubically to those of another grid."""
    if tuple(grid) == tuple(to):
        return weight
    image = weight[prefix:].float().T.unflatten(1, grid)[None]
    resized = F.interpolate(image, size=to, mode="bicubic", align_corners=False)[0].flatten(1).T
    return torch.cat([weight[:prefix], resized.to(weight.dtype)])


class LionImageLayer(LionLayer):
    """A layer with pre-norm whose residual branches may have factors per channel, and are dropped for some images."""

    def __init__(self, config: LionVisionConfig, drop_path_rate: float):
        super().__init__(config)
        self.drop_path_rate = drop_path_rate
        self.scales = None
        if config.layer_scale_init is not None:
            self.scales = nn.Parameter(torch.empty(2, config.hidden_size))
            self.initial_scale = config.layer_scale_init

    def init_parameters(self) -> None:
        if self.scales is not None:
            nn.init.constant_(self.scales, self.initial_scale)

    def after_mixing(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.branch(self.attention.project_out(y), 0)
        return x + self.branch(self.mlp(self.mlp_norm(x)), 1)

    def branch(self, x: Tensor, number: int) -> Tensor:
        """What a residual branch, x, adds."""
        x = self.dropout(x)
        return self.drop_path(x if self.scales is None else self.scales[number] * x)

    def drop_path(self, x: Tensor) -> Tensor:
        """In training, zero x, (B, L, D), for each image independently with the layer's rate, and divide the others by
        1 − rate (Huang et al., arXiv:1603.09382)."""
        if not self.training or self.drop_path_rate == 0:
            return x
        keep = 1 - self.drop_path_rate
        return x * (torch.rand(x.shape[0], 1, 1, device=x.device) < keep).to(x.dtype).div_(keep)


class LionImagePreTrainedModel(LionPreTrainedModel):
    """Initial weights, and what transformers needs to know about a model."""

    config_class = LionVisionConfig
    main_input_name = "pixel_values"
    _no_split_modules = ["LionImageLayer"]

    def _draw(self, weight: Tensor) -> None:
        nn.init.trunc_normal_(weight, std=self.config.initializer_range)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of two dimensions that weight decay omits, as timm's models do; biases and norms, of
        one dimension, are not among them."""
        return {name for name, _ in self.named_parameters() if "position_embeddings" in name or "scales" in name}


class LionImageModel(LionImagePreTrainedModel):
    """The encoder: images to hidden states of a class token and of patches."""

    def __init__(self, config: LionVisionConfig):
        super().__init__(config)
        self.embeddings = LionImageEmbeddings(config)
        last = max(config.num_hidden_layers - 1, 1)
        rates = [config.drop_path_rate * number / last for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(LionImageLayer(config, rate) for rate in rates)
        self.final_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.projection

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
    ) -> modeling_outputs.BaseModelOutputWithPooling | tuple:
        """Encode a batch of images.

        Args:
            pixel_values: (B, C, height, width), normalized; sides may be any multiples of the patch size.
            output_hidden_states: also return the embeddings and each layer's output, (B, L, D), without the last norm.
            output_attentions: also return each layer's matrix, (B, H, L, L), with rows divided by their sums.
            attention_form: the operator's form for this call, overriding the configuration.

        Returns last_hidden_state, (B, L, D), and pooler_output, (B, D): the class token's or the mean of all tokens.

        Raises ValueError for images of another shape, or the matrix of a form that has none.
        """
        config, form = self.config, attention_form or self.config.attention_form
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = self.returns_dict(return_dict)
        x, hidden_states, matrices = self._encode(pixel_values, form, output_hidden_states, output_attentions)
        x = self.final_norm(x)
        pooled = x[:, 0] if config.class_token else x.mean(1)
        output = modeling_outputs.BaseModelOutputWithPooling(
            x, pooled, hidden_states, matrices if output_attentions else None
        )
        return output if return_dict else output.to_tuple()

    def get_intermediate_layers(
        self, pixel_values: Tensor, layers: int | Sequence[int] = 1, *, norm: bool = True, reshape: bool = False
    ) -> list[Tensor]:
        """Return the patches' states after the last `layers` layers, or after those of these numbers from 0: (B, h·w,
        D) each, or (B, D, h, w) to reshape, after the last norm unless norm is False. Raises ValueError for others."""
        count = self.config.num_hidden_layers
        if isinstance(layers, int) and not 0 < layers <= count:
            raise ValueError(f"layers must be from 1 to {count} (got {layers})")
        numbers = range(count - layers, count) if isinstance(layers, int) else layers
        _, states, _ = self._encode(pixel_values, self.config.attention_form, True)
        if wrong := [number for number in numbers if not -count <= number < count]:
            raise ValueError(f"layers are numbered from 0 to {count - 1} (got {wrong[0]})")
        chosen = [states[number % count + 1] for number in numbers]
        chosen = [self.final_norm(x) if norm else x for x in chosen]
        chosen = [x[:, self.config.num_prefix_tokens :] for x in chosen]
        grid = [side // self.config.patch_size for side in pixel_values.shape[2:]]
        return [x.mT.unflatten(2, grid) for x in chosen] if reshape else chosen

    def orders(self, pixel_values: Tensor) -> Tensor | None:
        """Return the tokens of images, (B, C, height, width), in each order of patches, (2, L); None for one order."""
        if self.config.num_orders < 2:
            return None
        grid = (side // self.config.patch_size for side in pixel_values.shape[2:])
        return snakes(*grid, self.config.num_prefix_tokens, pixel_values.device)

    def _encode(self, pixel_values: Tensor, form: str, output_hidden_states=False, output_attentions=False):
        """Return what `_run_layers` does."""
        config = self.config
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels:
            wanted = f"(batch, {config.num_channels}, height, width)"
            raise ValueError(f"pixel_values must be {wanted} (got {tuple(pixel_values.shape)})")
        height, width = pixel_values.shape[2:]
        if height % config.patch_size or width % config.patch_size:
            raise ValueError(f"images of {height}×{width} pixels are not divisible by patch_size={config.patch_size}")
        orders = self.orders(pixel_values)
        return self._run_layers(
            self.embeddings(pixel_values),
            lambda layer, x: layer(x, None, None, form, output_attentions, orders=orders),
            output_hidden_states,
        )


@dataclass
class LionImageClassifierOutput(ModelOutput):
    """`logits`, (B, classes); with a distillation token, they are the mean of the other two."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    class_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


class LionForImageClassification(LionImagePreTrainedModel):
    """The encoder with a linear classifier; with a distillation token, a second one reads that."""

    def __init__(self, config: LionVisionConfig):
        super().__init__(config)
        self.lion = LionImageModel(config)
        self._add_classifiers()
        self.post_init()

    def _add_classifiers(self) -> None:
        D, classes = self.config.hidden_size, self.config.num_labels

        def classifier() -> nn.Module:
            return nn.Linear(D, classes) if classes else nn.Identity()

        self.classifier = classifier()
        self.distillation_classifier = classifier() if self.config.distillation_classifier else None

    def reset_classifier(self, num_labels: int) -> None:
        """Replace the classifier by a new one; for 0 classes, the logits are the features, (B, D)."""
        self.config.id2label = {number: f"LABEL_{number}" for number in range(num_labels)}
        self.config.label2id = {label: number for number, label in self.config.id2label.items()}
        device, dtype = self.lion.final_norm.weight.device, self.lion.final_norm.weight.dtype
        self._add_classifiers()
        for head in (self.classifier, self.distillation_classifier):
            if head is not None:
                self._init_weights(head.to(device, dtype))

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_form: str | None = None,
        interpolate_pos_encoding: bool | None = None,
    ) -> LionImageClassifierOutput | tuple:
        """Classify images. Arguments: `LionImageModel.forward`; labels: (B,) class indices, or (B, num_labels), see
        `classification_loss`; interpolate_pos_encoding: an argument of ViT's, without effect, since position embeddings
        are always resized."""
        return_dict = self.returns_dict(return_dict)
        output = self.lion(pixel_values, output_attentions, output_hidden_states, True, attention_form)
        logits, class_logits, distillation_logits = self.classifier(output.pooler_output), None, None
        if self.distillation_classifier is not None:
            class_logits, distillation_logits = logits, self.distillation_classifier(output.last_hidden_state[:, 1])
            logits = (class_logits + distillation_logits) / 2
        loss = None if labels is None else classification_loss(self.config, logits, labels)
        result = LionImageClassifierOutput(
            loss, logits, class_logits, distillation_logits, output.hidden_states, output.attentions
        )
        return result if return_dict else result.to_tuple()

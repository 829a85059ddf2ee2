"""The DSpark draft as a module to train, and the target that it learns from.

What vLLM 0.32's `Qwen3DSparkModel` computes for one block a request, this computes for many blocks of each sequence in
one pass. A block belongs to an anchor, the token at position t whose predecessors' states are known:

- its inputs are the anchor's embedding and K - 1 times the mask's, at positions t to t + K - 1;
- each of its queries sees the context, positions below t, and its whole block: inside a block attention isn't causal;
- keys and values of the context are projections of the target's fused auxiliary states, not of the draft's own;
- its i-th output, with the Markov bias of the token before, predicts the token at t + 1 + i.

Shapes: B sequences, S tokens, A anchors a sequence, K tokens a block, H hidden, L auxiliary layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.errors import UserError
from cluster.models.folder import ModelFolder

# Llama's way of embedding, norm and head, which the draft shares unscaled.
_TARGET_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Everything the draft's config says. Attention has the target's head shape, so that both share a block size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    markov_rank: int
    mask_token_id: int


class DraftModel(nn.Module):
    """The trained part of the draft: everything but the embedding and the head, which are the target's."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        # One for all layers: vLLM 0.32 on a CPU gives the context's keys of every layer the first one's.
        k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.layers = nn.ModuleList(_DraftLayer(shape, k_norm) for _ in range(shape.num_layers))
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.markov_head = _MarkovHead(shape)
        self.confidence_head = _ConfidenceHead(hidden + shape.markov_rank)
        self._initialise()

    def forward(self, states: Tensor, block_embeddings: Tensor, anchors: Tensor) -> Tensor:
        """Head inputs [B, A, K, H] from states [B, S, L · H], block embeddings [B, A, K, H] and anchors [B, A]."""
        count, length, block = anchors.shape[1], states.shape[1], self.shape.block_size
        context = self.hidden_norm(self.fc(states))
        block_positions = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        rotary = _Rotary(self.shape, block_positions, torch.arange(length, device=anchors.device)[None])
        hidden = block_embeddings.flatten(1, 2)
        mask = _block_mask(anchors, length, block, context.dtype)
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, mask)
        return self.norm(hidden).unflatten(1, (count, block))

    def adopt(self, target_norm: Tensor, states: Tensor) -> None:
        """Start with the target's last norm, which its head expects, and with auxiliary states of equal weight.

        `states` is [N, L · H], some of what `fc` will be given: later layers' are many times as large as the first's.
        """
        self.norm.weight.data.copy_(target_norm)
        layers = len(self.shape.target_layer_ids)
        sizes = states.float().unflatten(-1, (layers, -1)).square().mean(dim=(0, 2)).sqrt()
        self.fc.weight.data /= sizes.repeat_interleave(self.shape.hidden_size)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data /= (2 * self.shape.num_layers) ** 0.5
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, values: Tensor) -> Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * self.weight).to(values.dtype)


class _Rotary:
    """Cosines and sines of the block's and the context's positions, for `apply`: neox style, halves rotated."""

    def __init__(self, shape: DraftShape, block_positions: Tensor, context_positions: Tensor) -> None:
        exponents = torch.arange(0, shape.head_dim, 2, device=block_positions.device) / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        self.block = _angles(block_positions, frequencies)
        self.context = _angles(context_positions, frequencies)

    @staticmethod
    def apply(values: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """`values` is [B, tokens, heads, head_dim]."""
        cosines, sines = (part.to(values.dtype) for part in angles)
        first, second = values.chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = (positions[..., None] * frequencies)[:, :, None]
    return angles.cos(), angles.sin()


class _Attention(nn.Module):
    def __init__(self, shape: DraftShape, k_norm: RMSNorm) -> None:
        super().__init__()
        hidden, self._head_dim = shape.hidden_size, shape.head_dim
        self._queries_a_key = shape.num_heads // shape.num_kv_heads
        self.q_proj = nn.Linear(hidden, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = k_norm

    def forward(self, hidden: Tensor, context: Tensor, rotary: _Rotary, mask: Tensor) -> Tensor:
        queries = rotary.apply(self.q_norm(self._heads(self.q_proj(hidden))), rotary.block)
        keys = torch.cat([self._keys(context, rotary.context), self._keys(hidden, rotary.block)], dim=1)
        values = torch.cat([self._heads(self.v_proj(context)), self._heads(self.v_proj(hidden))], dim=1)
        # Repeated rather than left to the kernel: the one that is fast with a mask has no grouped queries.
        keys, values = (part.repeat_interleave(self._queries_a_key, dim=2).transpose(1, 2) for part in (keys, values))
        mixed = functional.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, self._head_dim))

    def _keys(self, inputs: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return _Rotary.apply(self.k_norm(self._heads(self.k_proj(inputs))), angles)


class _Mlp(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape, k_norm: RMSNorm) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape, k_norm)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _Mlp(shape)

    def forward(self, hidden: Tensor, context: Tensor, rotary: _Rotary, mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rotary, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _MarkovHead(nn.Module):
    """What the token before adds to the logits: a V × r embedding and an r × V projection."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocab_size, bias=False)


class _ConfidenceHead(nn.Module):
    """The logit of a drafted token's acceptance, from the head's input and the Markov embedding of the token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, markov_embedding: Tensor) -> Tensor:
        # In float32, as vLLM does it, and so not by a linear layer, which autocast would narrow.
        features = torch.cat([hidden, markov_embedding], dim=-1).float()
        return (features * self.proj.weight[0]).sum(dim=-1) + self.proj.bias


def _block_mask(anchors: Tensor, length: int, block: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where a block's query may look, else -inf; [B, 1, A · K, S + A · K]."""
    count = anchors.shape[1]
    context = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = torch.eye(count, dtype=torch.bool, device=anchors.device).repeat_interleave(block, dim=1)
    visible = torch.cat([context, own.expand(len(anchors), -1, -1)], dim=-1).repeat_interleave(block, dim=1)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))[:, None]


class TargetModel:
    """The target, frozen: auxiliary and last hidden states of whole sequences, embedding and head.

    bfloat16 on a GPU, as vLLM serves it, float32 on a CPU. Raises UserError for a target whose family the draft's
    form doesn't fit.
    """

    def __init__(self, folder: ModelFolder, layer_ids: Sequence[int], device: torch.device) -> None:
        check_family(folder)
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=dtype).to(device).eval().requires_grad_(False)
        self.norm: Tensor = model.base_model.norm.weight
        self.head: Tensor = model.get_output_embeddings().weight
        self.embed: nn.Module = model.get_input_embeddings()
        self._model = model.base_model
        self._captured: dict[int, Tensor] = {}
        self._layer_ids = tuple(layer_ids)
        for layer in self._layer_ids:
            self._model.layers[layer].register_forward_hook(self._capture(layer))

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens [B, S]: what leaves the auxiliary layers, [B, S, L · H], and the head's input, [B, S, H].

        Sequences may be padded on the right: attention is causal, so padding changes nothing before it.
        """
        with torch.no_grad():
            last = self._model(input_ids=tokens, use_cache=False).last_hidden_state
        auxiliary = torch.cat([self._captured[layer] for layer in self._layer_ids], dim=-1)
        self._captured.clear()
        return auxiliary, last

    def _capture(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook


def check_family(folder: ModelFolder) -> None:
    """Raise UserError unless the target's embedding, norm and head are used as the draft uses them."""
    model_type = folder.text_config.get("model_type")
    if model_type not in _TARGET_TYPES:
        raise UserError(
            f"target {folder.name}",
            f"its type is {model_type}, and drafts of the form Qwen3DSparkModel are for {', '.join(_TARGET_TYPES)}",
            "choose a target of one of these families",
        )


def draft_shape(
    target: ModelFolder,
    *,
    num_layers: int,
    intermediate_size: int,
    block_size: int,
    markov_rank: int,
    num_auxiliary_layers: int,
    mask_token_id: int,
) -> DraftShape:
    """The shape of a draft for `target`, with auxiliary layers spread evenly between its second and second-last."""
    config = target.text_config
    depth, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    first, last = min(1, depth - 1), max(depth - 2, 0)
    steps = max(num_auxiliary_layers - 1, 1)
    layer_ids = sorted({first + round((last - first) * index / steps) for index in range(num_auxiliary_layers)})
    rope = config.get("rope_parameters") or {}
    return DraftShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rms_norm_eps=float(config["rms_norm_eps"]),
        max_positions=int(config["max_position_embeddings"]),
        num_target_layers=depth,
        target_layer_ids=tuple(layer_ids),
        block_size=block_size,
        markov_rank=markov_rank,
        mask_token_id=mask_token_id,
    )


def choose_mask_token(folder: ModelFolder) -> int:
    """The id of a token that stands for "not known yet": a special token that a conversation never has.

    The draft shares the target's embedding, so the mask must be one of its rows: the last special token that is
    neither padding nor an end nor in the chat template, else the vocabulary's last token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.path)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    special = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in used and token.content not in template
    ]
    vocabulary = int(folder.text_config["vocab_size"])
    return max((index for index in special if index < vocabulary), default=vocabulary - 1)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

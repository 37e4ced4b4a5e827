"""Families: what swd_lens knows of architectures by name, and what a model's settings say of its own.

1. `FAMILIES` has one record for each family that needs one: what its checkpoints call their matrices, and whether they hold
   query, key and value as one. A family without a record works, too; its sites go by swd_lens' own names only. To add one, write
   its record here, and its small checkpoint in tests/families.py, on which the tests of all families then run.
2. `SCORED_ATTENTION` and `CACHE_LAYERS` say the same of parts: attention components of bridges whose scores are known, and
   layers of Hugging Face's caches that can be kept and run on.
3. `facts_of(model)` reads everything else off the settings, in one place: norm, positions, direction, activation, soft caps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rotary", "alibi", "none"]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architectures: how the names of its model classes in Hugging Face begin.
        packed: its checkpoints hold query, key and value as one matrix: attn_qkv is a site, and its parts are alternatives.
        own_reader: HookedTransformer reads its weights in a way of its own, not off transformers' model.
        encoder: HookedTransformer's reader of configurations knows it, HookedTransformer itself does not (HookedEncoder and
            others were for it).
        blocks: path of the list of blocks in Hugging Face's model, with further ones where a model has it elsewhere.
        modules: kind of a site -> what its module is called within a block.
    """

    architectures: tuple[str, ...]
    packed: bool = False
    own_reader: bool = False
    encoder: bool = False
    blocks: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)


_LLAMA_MLP = {"mlp_gate": "mlp.gate_proj", "mlp_in": "mlp.up_proj", "mlp_out": "mlp.down_proj"}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        ("GPT2LMHead",),
        packed=True,
        blocks=("transformer.h",),
        modules={"attn_qkv": "attn.c_attn", "attn_o": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"},
    ),
    "neox": Family(
        ("GPTNeoXForCausalLM",),
        packed=True,
        blocks=("gpt_neox.layers",),
        modules={
            "attn_qkv": "attention.query_key_value",
            "attn_o": "attention.dense",
            "mlp_in": "mlp.dense_h_to_4h",
            "mlp_out": "mlp.dense_4h_to_h",
        },
    ),
    "bloom": Family(("BloomForCausalLM",), packed=True),
    "qwen": Family(("QWenLMHeadModel",), packed=True),
    "phi3": Family(("Phi3ForCausalLM",), packed=True),
    # And those that call their modules as Llama does: Mistral, Gemma, OLMo and others.
    "llama": Family(
        ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"),
        blocks=("model.layers", "model.language_model.layers"),
        modules={**{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkvo"}, **_LLAMA_MLP},
    ),
    # Three layers in four are linear attention (a gated delta net).
    "qwen3_5": Family(
        ("Qwen3_5ForCausalLM",),
        blocks=("model.layers", "model.language_model.layers"),
        modules={
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "attn_beta": "linear_attn.in_proj_b",
            "attn_decay": "linear_attn.in_proj_a",
            "attn_o": "linear_attn.out_proj",
            **_LLAMA_MLP,
        },
    ),
    "bert": Family(
        ("Bert",),
        encoder=True,
        blocks=("bert.encoder.layer",),
        modules={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_o": "attention.output.dense",
            "mlp_in": "intermediate.dense",
            "mlp_out": "output.dense",
        },
    ),
    "gemma3 with images": Family(("Gemma3ForConditionalGeneration",), own_reader=True),
    "gpt_oss": Family(("GptOssForCausalLM",), own_reader=True),
    "t5": Family(("T5",), encoder=True),
    "hubert": Family(("Hubert",), encoder=True),
}


def family_of(architecture: str | None) -> Family:
    """The record of a model class, by its name; an empty one where there is none."""
    return next((f for f in FAMILIES.values() if str(architecture).startswith(f.architectures)), Family(()))


def block_paths() -> list[str]:
    """The families' paths of their lists of blocks, each once."""
    return list(dict.fromkeys(path for family in FAMILIES.values() for path in family.blocks))


def module_paths(layer: int, kind: str) -> list[str]:
    """Names of a kind's module within the list of blocks, "h.8.mlp.c_proj": every list with every module, since a family
    without a record may combine them."""
    roots = dict.fromkeys(path.rpartition(".")[2] for path in block_paths())
    names = dict.fromkeys(f.modules[kind] for f in FAMILIES.values() if kind in f.modules)
    return [f"{root}.{layer}.{name}" for root in roots for name in names]


def has_hooked_transformer() -> bool:
    """Whether this transformer_lens has HookedTransformer (3.9); in 4.x the name itself raises."""
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


def require_hooked_transformer(error: type[Exception]) -> None:
    """Raise `error` where this transformer_lens has no HookedTransformer."""
    if not has_hooked_transformer():
        raise error(
            "this transformer_lens has no HookedTransformer; install 'transformer_lens>=3.9,<4', or load a "
            'TransformerBridge: kind="bridge"'
        )


@dataclass(frozen=True)
class ScoredAttention:
    """An attention component of bridges whose forward is transformer_lens' own; others leave it to transformers."""

    own_scale: bool = False  # scale and soft cap are those of Hugging Face's module; else the scale is 1 / sqrt(d_head)
    scaled_by_layer: bool = False  # with cfg.scale_attn_by_inverse_layer_idx scores are divided by layer + 1


SCORED_ATTENTION: Mapping[str, ScoredAttention] = {
    "JointQKVAttentionBridge": ScoredAttention(scaled_by_layer=True),
    "JointQKVPositionEmbeddingsAttentionBridge": ScoredAttention(),
    "PositionEmbeddingsAttentionBridge": ScoredAttention(own_scale=True),
}


# Layers of Hugging Face's caches that never write to the keys and values they keep, by name (which of them there are depends on
# the version of transformers) -> whether their update is one concatenation along positions, and nothing else.
CACHE_LAYERS: Mapping[str, bool] = {"DynamicLayer": True, "DynamicSlidingWindowLayer": False, "LinearAttentionLayer": False}


# What a module calls the rate of a dropout that is a function, not an nn.Dropout (Llama's and Qwen's attention).
DROPOUT_RATES = ("attention_dropout", "dropout", "dropout_p", "hidden_dropout", "activation_dropout")


POSITIONS: Mapping[str, Positions] = {"standard": "learned", "rotary": "rotary", "alibi": "alibi", "none": "none"}
# Activation functions that mix neurons: their derivative is no slope per neuron.
_MIXING = ("solu", "softmax")


@dataclass(frozen=True)
class Facts:
    """A model's properties, read off its settings."""

    bridge: bool  # a TransformerBridge, else a HookedTransformer
    family: Family  # its record
    reads_out: bool  # next-token logits are read off its last block
    causal: bool  # a position sees earlier ones only, and logits are read out: the model can write on
    norm: Norm | None  # of the residual stream: "layer" takes the mean out, "rms" does not; None: there is none
    eps: float  # of the norms
    positions: Positions | None  # how they enter; None: in a way that is not known here
    adjacent_pairs: bool  # rotary pairs are (2i, 2i + 1)
    activation: str  # name of the MLPs' activation function
    mixes_neurons: bool  # the activation function does not see neurons one by one
    score_cap: float | None  # score_cap, logit_cap: soft caps of attention scores and of logits; None = none
    logit_cap: float | None


def is_bridge(model: Any) -> bool:
    """Whether the model is a TransformerBridge."""
    return any(cls.__name__ == "TransformerBridge" for cls in type(model).__mro__)


def is_hooked(model: Any) -> bool:
    """Whether the model is a HookedTransformer (transformer_lens 3.9; 4.x has none to ask isinstance of)."""
    return any(cls.__name__ == "HookedTransformer" for cls in type(model).__mro__)


def facts_of(model: Any) -> Facts:
    """Read off the model's settings as they are now."""
    cfg = model.cfg
    reads_out = bool(getattr(getattr(model, "adapter", None), "supports_generation", True))
    normalization = None if cfg.normalization_type is None else str(cfg.normalization_type)
    takes_mean = normalization is not None and normalization.startswith("LN") and not getattr(cfg, "uses_rms_norm", False)
    activation = str(getattr(cfg, "act_fn", ""))
    caps = (float(getattr(cfg, name, None) or 0) for name in ("attn_scores_soft_cap", "output_logits_soft_cap"))
    score_cap, logit_cap = (cap if cap > 0 else None for cap in caps)  # TransformerLens says -1 or 0 where there is none
    return Facts(
        bridge=is_bridge(model),
        # A HookedTransformer says original_architecture, a bridge architecture.
        family=family_of(getattr(cfg, "original_architecture", None) or getattr(cfg, "architecture", None)),
        reads_out=reads_out,
        causal=reads_out and str(getattr(cfg, "attention_dir", "causal")) != "bidirectional",
        norm=None if normalization is None else "layer" if takes_mean else "rms",
        eps=float(getattr(cfg, "eps", 1e-5)),
        positions=POSITIONS.get(str(getattr(cfg, "positional_embedding_type", "standard"))),
        adjacent_pairs=bool(getattr(cfg, "rotary_adjacent_pairs", False)),
        activation=activation,
        mixes_neurons=activation.startswith(_MIXING),
        score_cap=score_cap,
        logit_cap=logit_cap,
    )

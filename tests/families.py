"""Small checkpoints of every architecture that swd_lens serves, written by transformers itself, and hosts made of them.

`checkpoint(name)` writes a two- to four-layer model with random weights (every part of an order that matters) once per test
run; `hooked(name)` and `bridge(name)` load it the way a user would, with `load_host`.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.hosts.load import load_host

_FOLDER = tempfile.TemporaryDirectory(prefix="swd-lens-")  # checkpoints; it goes with the process
D_VOCAB = 1366  # the embedded model's tokenizer
_SMALL = {"max_position_embeddings": 64, "vocab_size": D_VOCAB, "num_hidden_layers": 2, "hidden_size": 16}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = {**_SMALL, **_HEADS, **_ENDS}
# Keys of 8, not 4: they are normalized to length one, and a key of length near zero turns rounding into 1e-5 of a logit.
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

# name -> (model class, config class, config); the linear attention layers of Qwen3.5 are three in four.
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": D_VOCAB, **_ENDS},
    ),
    "pythia": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_SMALL, "num_attention_heads": 2, "intermediate_size": 32, "rotary_pct": 0.5, **_ENDS},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SMALL, **_HEADS, **_ENDS}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SMALL, **_HEADS, **_ENDS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SMALL, **_HEADS, "head_dim": 8, **_ENDS}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_SMALL, **_HEADS, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32, **_ENDS},
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**_SMALL, **_HEADS, "num_hidden_layers": 4, "head_dim": 8, **_LINEAR, **_ENDS},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**_SMALL, "num_attention_heads": 2, "intermediate_size": 32}),
}
FAMILIES = tuple(_CONFIGS)
# Families for single tests: of flat MLPs, and those that transformer_lens 3.9 computes otherwise than transformers.
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", SIZES),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**SIZES, "pad_token_id": 0}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**SIZES, "pad_token_id": 0, "sliding_window": 32}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {**SIZES, "head_dim": 8}),
}
HOOKED = ("gpt2", "pythia", "llama", "qwen2", "qwen3")  # what HookedTransformer 3.9 loads from a local folder
CAUSAL = tuple(name for name in FAMILIES if name != "bert")


# Architectures of the page "Which models" (tests/which_models.py): all that this transformer_lens' bridge has an adapter for and
# transformers has a language model of. What of a configuration differs from _ANY; the model class is f"{name}ForCausalLM".
_ANY: dict[str, Any] = {
    **SIZES,
    "head_dim": 4,
    "pad_token_id": 0,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_OLD = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": D_VOCAB, **_ENDS}
_LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
    **{"num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_PLAIN = """\
    Afmoe Apertus Arcee Cohere Ernie4_5 Ernie4_5_Moe Exaone4 FlexOlmo Gemma Gemma3 Gemma4 Glm Glm4 Glm4Moe Granite GraniteMoe
    Jais2 JetMoe Laguna Llama Llama4 MiniMaxM2 Ministral3 Mistral Mixtral Mpt NanoChat Nemotron Olmo Olmo2 Olmo3 OlmoHybrid Olmoe
    Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Rwkv SeedOss SmolLM3 StableLm Starcoder2 XGLM
"""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "CodeGen": _OLD,
    "Cohere2": {"sliding_window": 32},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "DeepseekV4": {"head_dim": 8},
    "FalconH1": {**_STATES, "mamba_d_ssm": 32},
    "FalconMamba": {"state_size": 8},
    "Falcon": {"head_dim": None},
    "GPT2": _OLD,
    "GPTBigCode": _OLD,
    "GPTJ": _OLD,
    "GPTNeoX": {"num_key_value_heads": 4},
    "Gemma2": {"query_pre_attn_scalar": 4, "sliding_window": 32},
    "Glm4MoeLite": _LATENT,
    "GptOss": {"sliding_window": 32},
    "GraniteMoeHybrid": {**_STATES, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "HunYuanDenseV1": {"head_dim": 8},
    "Jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "head_dim": 8, "num_heads": 4, "n_groups": 1},
    "NemotronH": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
    },
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Qwen3Next": {**_LINEAR, "num_hidden_layers": 4, "head_dim": 8},
    "Qwen3_5": {**_LINEAR, "num_hidden_layers": 4, "head_dim": 8},
}
_CONFIG_CLASSES = {
    "Qwen3_5": "Qwen3_5TextConfig",
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
}


def architecture(name: str) -> tuple[str, str, dict[str, Any]]:
    """Model class, configuration class and configuration of one of ARCHITECTURES."""
    changed = ARCHITECTURES[name]
    config = changed if changed is _OLD else {key: v for key, v in {**_ANY, **changed}.items() if v is not None}
    return (f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel", _CONFIG_CLASSES.get(name, f"{name}Config"), config)


@cache
def checkpoint(name: str) -> Path:
    """A folder with config.json, weights and tokenizer."""
    return written(*(_CONFIGS | _OTHERS)[name])


def written(model_class: str, config_class: str, config: dict[str, Any]) -> Path:
    """A folder with a checkpoint of any architecture, its weights random, its tokenizer the embedded model's."""
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    folder = Path(tempfile.mkdtemp(prefix=f"swd-lens-{model_class}-", dir=_FOLDER.name))
    model.save_pretrained(folder)
    load_tokenizer(WEIGHTS).save_pretrained(folder)
    return folder


def reference(name: str) -> Any:
    """transformers' own model."""
    return network((_CONFIGS | _OTHERS)[name][0], checkpoint(name))


def network(model_class: str, folder: Path) -> Any:
    """transformers' own model of a folder."""
    return getattr(transformers, model_class).from_pretrained(folder, local_files_only=True).eval()


def hooked(name: str) -> Any:
    return load_host(str(checkpoint(name)), kind="hooked")


def bridge(name: str) -> Any:
    return load_host(str(checkpoint(name)), kind="bridge")


def some_tokens(rows: int = 2, pos: int = 9, seed: int = 0) -> torch.Tensor:
    """Token ids that are not special ones."""
    return torch.randint(8, D_VOCAB, (rows, pos), generator=torch.Generator().manual_seed(seed))


@cache
def _folder(name: str) -> str:
    return str(written(*architecture(name)))


def loaded(name: str) -> Any:
    """One of ARCHITECTURES as a bridge, as a user loads it."""
    return load_host(_folder(name), kind="bridge")

"""Models that are refused before any weight is read: those that are no language model, or whose tensors are packed.

1. Sites are of decoders, or of encoders with a vocabulary to predict (BERT). An encoder-decoder keeps its blocks in two stacks,
   one of which reads the other; a vision or sound model has no tokens.
2. A quantized checkpoint's matrices are not stored as numbers that h @ W could take. transformers turns those of UNPACKED methods
   back into plain ones where it loads them; the others have to be, by whoever has the library.
3. A model in memory may hold such tensors, too (torchao's stand in nn.Linear itself): `packed_in`.
"""

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swd_lens.base.errors import UnsupportedHostError

UNPACKED = ("mxfp4", "fp8")


def require_language_model(name: str, label: str) -> None:
    """Refuse a checkpoint that swd_lens cannot serve, whatever its weights are.

    Args:
        name: a folder, or a name on the hub.
        label: of the error.

    Raises UnsupportedHostError: it is an encoder-decoder, predicts no tokens, is quantized, or does not say what it is.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    config = AutoConfig.from_pretrained(name)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedHostError(
            f"{label} is an encoder-decoder ({config.model_type}), whose decoder reads its encoder; swd_lens serves "
            "models of one stack"
        )
    predicting = (
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    # A model whose code comes with it (auto_map) stands in no list of transformers.
    if config.model_type not in predicting and not getattr(config, "auto_map", None):
        raise UnsupportedHostError(
            f"{label} is no language model ({config.model_type}): swd_lens serves models that predict tokens"
        )
    quantized = getattr(config, "quantization_config", None) or {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
    method = getattr(method, "value", method)  # an enum, where transformers has parsed it
    if method is not None and method not in UNPACKED:
        raise UnsupportedHostError(
            f"{label} is quantized ({method}): what is stored are no matrices to factorize. Load the checkpoint that it "
            "was made of, or write a plain one: model.dequantize().save_pretrained(folder)"
        )
    if not config.architectures:
        raise UnsupportedHostError(
            f"the config.json of {label} says that it is of the family {config.model_type}, and not which model: give it "
            '"architectures", as save_pretrained does (["LlamaForCausalLM"])'
        )


def packed_in(model: nn.Module) -> str | None:
    """The first parameter that is no plain tensor (quantized by torchao, sharded), with its class; None where all are."""
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter.data):
            name = name.replace("._original_component", "")  # a bridge's, around each module of transformers
            return f"{name} is a {type(parameter.data).__name__}"
    return None

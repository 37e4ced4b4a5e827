"""The embedded model: a small TransformerLens model with tokenizer, corpus and training script, all offline.

corpus (strings) -> tokenizer -> train (network, score) -> weights/ -> load_default_model, text_tokens
"""

from swd_lens.hosts.embedded.load import load_default_model, load_model_folder, text_tokens

__all__ = ["load_default_model", "load_model_folder", "text_tokens"]

"""load_host: a HookedTransformer by name (from the hub) or from a local Hugging Face checkpoint folder (offline)."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swd_lens.hosts import UnsupportedHostError


def load_host(name: str) -> Any:
    """Load a model as it was trained: no LayerNorm folding, no centring, so that factors are of the published weights.

    Args:
        name: a TransformerLens model name ("gpt2"), or a folder with config.json, weights and tokenizer.

    Raises:
        UnsupportedHostError: the installed transformer_lens has no HookedTransformer (4.x).
        ValueError, OSError: the name is unknown, the hub cannot be reached, or the folder is not a checkpoint.
    """
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        raise UnsupportedHostError(
            "this transformer_lens has no HookedTransformer; install 'transformer_lens>=3.9,<4'"
        ) from None
    if not Path(name).is_dir():
        return HookedTransformer.from_pretrained_no_processing(name).eval()
    return _load_folder(Path(name), HookedTransformer)


def _load_folder(folder: Path, hooked_transformer: Any) -> Any:
    """HookedTransformer.from_pretrained refuses folders (it looks the name up in its list); its own parts do not."""
    from transformer_lens import loading_from_pretrained as loading
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json; give a Hugging Face checkpoint folder (save_pretrained writes one)"
        )
    checkpoint = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with _readable_config(folder) as config_folder:
        cfg = loading.get_pretrained_model_config(config_folder, fold_ln=False)
    cfg.model_name = folder.name
    model = hooked_transformer(cfg, tokenizer)
    state = loading.get_pretrained_state_dict(str(folder), cfg, checkpoint)
    model.load_and_process_state_dict(
        state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    return model.eval()


@contextmanager
def _readable_config(folder: Path) -> Iterator[str]:
    """A folder whose config.json TransformerLens 3.9 can read: it asks GPT-2 for n_ctx, which transformers 5 no longer writes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "n_positions" in config:
        config.setdefault("n_ctx", config["n_positions"])
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield temporary

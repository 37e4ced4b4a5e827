"""Fixed-support fine-tuning (SWD-FT): all factors of a replacement trained together, on their nonzeros only."""

from swd_lens.base.errors import FinetuneError
from swd_lens.train.finetune.run import finetune
from swd_lens.train.finetune.spec import PRESETS, FinetuneSpec

__all__ = ["PRESETS", "FinetuneError", "FinetuneSpec", "finetune"]

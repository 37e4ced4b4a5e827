"""Whether a loaded host computes what transformers' own model of the same checkpoint computes.

1. `Reference.see` runs one short row of seeded tokens through transformers' model, as soon as that is loaded and before anything
   wraps it or reads its weights. Only its logits are kept.
2. `Reference.require` runs the same row through the host. The difference is the largest one of any logit, over the largest
   logit of transformers' model. `load_host` processes no weights, so that logits are compared as they are.
3. Above `WARNED` one warning, above `REFUSED` an error. float32 arithmetic in another order differs by 1e-6 (SmolLM2-135M: 1.4e-6
   in both kinds of host); StableLM, Cohere and HunYuan on transformer_lens 3.9 differ by .06 to .13.
4. Rounding to half precision hides such errors: SmolLM2 in bfloat16 differs from itself in float32 by .035, in float16 by .002.
   Where float32 weights take at most `EXACT_BYTES`, both models' weights are float32 for the row, and then those very
   tensors again. What a host made of rounded numbers when it was built stays (rotary angles of a HookedTransformer: SmolLM2 in
   bfloat16 differs by .0012), so that the bounds are 1 and 2 steps of the dtype, where that is more: .008 and .016 in bfloat16.
   Larger models are compared in half precision, within 4 and 8 steps (.03 and .06).
5. A model that gives no logits for a row of tokens (speech, images, encoder and decoder) is not compared, and a warning says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.base.errors import HostDiffersError, legible, warn
from swd_lens.base.machine import is_out_of_memory
from swd_lens.hosts.families import is_bridge

N_TOKENS = 32
REFUSED, WARNED = 1e-3, 1e-4  # of the largest logit
EXACT_BYTES = 2**31
_HALF = (torch.float16, torch.bfloat16)

# Host -> how far its logits were from transformers' when it was loaded.
_FOUND: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def difference_of(model: Any) -> float | None:
    """How far a host's logits were from transformers' when `load_host` loaded it, in largest logits; None: not compared."""
    return _FOUND.get(model)


class Reference:
    """The logits of transformers' own model for a row of tokens, which a host of the same checkpoint must give, too.

    Attributes:
        row: (1, pos) ids; None until a model was seen that gives logits for them.
        reason: why none were seen.
    """

    row: Int[Tensor, "1 pos"] | None = None
    logits: Float[Tensor, "1 pos vocab"]

    def __init__(self, name: str):
        self.name, self.reason = name, "transformer_lens loads it without transformers' own model"
        self.exact, self.step = True, 0.0

    def see(self, network: Any) -> None:
        """Run transformers' model; it is left as it was, to the bit."""
        text = network.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or N_TOKENS
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(int(text.vocab_size), (1, min(N_TOKENS, int(longest))), generator=generator)
        floats = [tensor for tensor in _tensors(network) if tensor.is_floating_point()]
        self.exact = 4 * sum(tensor.numel() for tensor in floats) <= EXACT_BYTES
        self.step = max((torch.finfo(tensor.dtype).eps for tensor in floats), default=0.0)
        training = network.training
        try:
            with torch.no_grad(), _in_float32(network) if self.exact else nullcontext():
                device = network.get_input_embeddings().weight.device
                ids = row.to(device)
                logits = network.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
        except Exception as cause:  # whatever a model raises that takes something else
            if is_out_of_memory(cause):
                raise
            self.reason = f"transformers' own model does not run on tokens alone ({type(cause).__name__}: {cause})"
            return
        finally:
            network.train(training)
        if not bool(logits.isfinite().all()):
            self.reason = "the logits of transformers' own model are not finite"
            return
        self.row, self.logits = row, logits

    def require(self, model: Any, kind: str, other: str | None) -> None:
        """Require that the host gives the same logits.

        Args:
            kind: "HookedTransformer" or "TransformerBridge".
            other: a kind that may be tried where it does not.

        Raises HostDiffersError: they differ by more than `REFUSED`, or the host does not run on these tokens; MemoryError,
        RuntimeError: there is no memory to compare them. Warns where they differ by more than `WARNED`, or are not compared.
        """
        if self.row is None:
            warn(f"{legible(self.name)} was loaded without being compared with transformers' own model: {legible(self.reason)}")
            return
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "transformer_lens"))
        try:
            with torch.no_grad(), _in_float32(model) if self.exact else nullcontext():
                if is_bridge(model):  # not by `host_of`: whether its matrices are sites is another question
                    from swd_lens.hosts.bridge.running import BridgeRuns  # at its use: slow to import

                    runs = BridgeRuns()
                    runs.model = model
                    logits = runs.run(self.row).float().cpu()
                else:
                    logits = model(self.row.to(model.cfg.device)).float().cpu()
        except Exception as cause:
            if is_out_of_memory(cause):  # no reason to take a host of another kind
                raise
            its_cause = f"{type(cause).__name__}: {cause}"
            raise HostDiffersError(
                f"transformers' own model of {self.name} runs on a row of tokens, and this {kind} does not ({its_cause}; "
                f"{versions}). check=False loads it all the same"
            ) from cause
        # The largest difference over the largest logit, and its position. Vocabularies may be padded.
        n_words = min(logits.shape[-1], self.logits.shape[-1])
        expected = self.logits[..., :n_words]
        apart = (logits[..., :n_words] - expected).abs().amax(-1)[0]
        position = int(apart.nan_to_num(torch.inf).argmax())
        largest = float(apart[position])
        difference = largest / float(expected.abs().max()) if largest else 0.0
        _FOUND[model] = difference
        steps = 1 if self.exact else 4
        refused, warned = max(REFUSED, 2 * steps * self.step), max(WARNED, steps * self.step)
        found = (
            f"this {kind} of {legible(self.name)} gives other logits than transformers' own model of the same checkpoint: by "
            f"up to {difference:.2g} of the largest, at position {position} of a row of {self.row.shape[1]} tokens "
            f"({versions})"
        )
        if not difference <= refused:  # nor where it is NaN
            advice = "Another version of transformer_lens may agree" if other is None else f'Try kind="{other}"'
            raise HostDiffersError(
                f"{found}. What is measured on it says nothing of the model. {advice}; check=False loads it all the same"
            )
        if difference > warned:
            warn(f"{found}, which is more than rounding makes")


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """While open, weights in half precision are float32; afterwards they are the very tensors that they were."""
    held = [(tensor, tensor.data) for tensor in _tensors(model) if tensor.dtype in _HALF]
    settings: Any = getattr(model, "cfg", None)  # TransformerLens' forwards ask it for the dtype
    dtype = getattr(settings, "dtype", None)
    try:
        for tensor, data in held:
            tensor.data = data.float()
        if held and dtype in _HALF:
            settings.dtype = torch.float32
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
        if held and dtype in _HALF:
            settings.dtype = dtype


def _tensors(model: Any) -> list[Tensor]:
    """Parameters and buffers, each once; of a bridge also those of the model that it wraps."""
    roots = [model, model.__dict__.get("original_model")]
    modules: list[nn.Module] = [module for root in roots if root is not None for module in root.modules()]
    tensors = [t for module in modules for t in (*module._parameters.values(), *module._buffers.values())]
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())

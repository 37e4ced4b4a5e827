"""Factors on the Hugging Face hub, through the hub client's own mixin: save_pretrained, push_to_hub, from_pretrained.

1. `OnHub._save_pretrained` is `save`, with a small config.json; `OnHub.generate_model_card` describes the set.
   The mixin's push_to_hub writes both into a temporary folder and commits it to the repository.
2. `OnHub.from_pretrained` takes a folder as it is. Of a repository it fetches the index first, then, at the commit that
   the index came from, exactly the files that the index names: nothing else that the repository holds is downloaded, and
   a push in between cannot mix two sets. Then it is `load`, which checks every hash.

transformer_lens imports the client anyway: this module adds 4 ms to `import swd_lens`.
"""

import re
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from swd_lens.base import __version__
from swd_lens.base.errors import FactorFileError, errors_seen, legible, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.units.index import FORMAT_VERSION, INDEX, read_index

_Set = TypeVar("_Set", bound="OnHub")
# Files that `swd_lens.units.storage.write_site` names: <site>.<12 digits of the hash>.safetensors, and never a model's.
_SITE_FILES = f"*.{'[0-9a-f]' * 12}.safetensors"
# A name that the hub's metadata accepts for a base model: "gpt2", "EleutherAI/pythia-70m".
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

CARD = """---
{{ card_data }}
---

# Sparse factors of {{ model }}

{{ sites | length }} weight matri{{ "x" if sites | length == 1 else "ces" }} of **{{ model }}**, each replaced by two sparse
factors, W ≈ read @ write (Sparse Weight Decomposition). The columns of the read factor and the rows of the write factor are
units: hooked, scored, ablated and edited like neurons. Together they have {{ units }} units and {{ edges }} edges, a sparsity
of {{ sparsity }} (1 - edges / dense weights).

```python
import swd_lens as swd

factors = swd.FactorSet.from_pretrained("{{ repo_id }}")
swd.attach(model, factors)  # model: {{ model }}, in TransformerLens
```

| site | d_in | units | d_out | edges | sparsity |
|---|---:|---:|---:|---:|---:|
{% for row in sites -%}
| {{ row | join(" | ") }} |
{% endfor %}
Written by swd_lens {{ version }}, factor format {{ format }}. Settings and provenance of every site are in `factors.json`.
"""


@with_torch_defaults
class OnHub(ModelHubMixin, library_name="swd_lens", tags=["interpretability", "sparse-weight-decomposition"]):
    """The hub's half of `swd_lens.FactorSet`, whose save and load it uses."""

    def push_to_hub(self: Any, repo_id: str, **options: Any) -> str:
        """Save into a temporary folder, with a model card, and commit it to a model repository (made if need be).

        Args:
            repo_id: "user/name".
            options: private, token, branch, commit_message, create_pr, ...: see huggingface_hub.ModelHubMixin.push_to_hub.
                delete_patterns: files of the repository that the commit removes if it does not write them; site files of
                an earlier push unless given, so that a set replaces the set that was there.

        Returns:
            URL of the commit.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: not logged in, no right to write there, ...
            FactorFileError: see `save`.
        """
        model = self.provenance.get("model", "an unnamed model")
        options = {
            "delete_patterns": [_SITE_FILES],
            "commit_message": f"Sparse factors of {model}",
            **options,
            "model_card_kwargs": {"repo_id": repo_id, **(options.get("model_card_kwargs") or {})},
        }
        return ModelHubMixin.push_to_hub(self, repo_id, **options)

    @classmethod
    @errors_seen
    def from_pretrained(
        cls: type[_Set],
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> _Set:
        """Load factors from a folder, or from a repository on the hub (kept in the hub client's cache).

        Args:
            pretrained_model_name_or_path: a folder that `save` or `save_pretrained` wrote, or "user/name".
            revision: branch, tag or commit of the repository; None: main.
            token: of the hub; None: the one that is logged in, if any.
            cache_dir: where downloads are kept; None: the hub client's own place (HF_HOME).
            local_files_only: use only what was downloaded before.
            force_download: download again what was downloaded before.

        Raises:
            FactorFileError: the repository holds no factors, or see `load`.
            FileNotFoundError: the folder holds no factors; no such folder; not reachable and not downloaded before.
            huggingface_hub.errors.RepositoryNotFoundError: no such repository, or no right to read it.
        """
        # Not the mixin's own: it would first look for a config.json, which factors do without.
        name = str(pretrained_model_name_or_path)
        if Path(name).is_dir():
            return cls.load(name)  # pyright: ignore[reportAttributeAccessIssue]
        where: dict[str, Any] = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
        try:
            index = Path(hf_hub_download(name, INDEX, revision=revision, force_download=force_download, **where))
        except LocalEntryNotFoundError as cause:
            raise LocalEntryNotFoundError(f"no factors of {legible(name)} on this machine: {legible(cause)}") from cause
        except EntryNotFoundError as cause:
            raise FactorFileError(
                f"{name} (revision {revision or 'main'}) holds no {INDEX}: it is not a repository of factors; give "
                "one that FactorSet.push_to_hub wrote"
            ) from cause
        except HFValidationError as cause:
            raise FileNotFoundError(
                f"{quoted(name)} is neither a folder on this machine nor the name of a repository (user/name)"
            ) from cause
        files = sorted({INDEX} | {entry["file"] for entry in read_index(index.parent)["sites"].values()})
        # index lies in snapshots/<commit>: the same commit again, not the branch, which may have moved on.
        folder = snapshot_download(name, revision=index.parent.name, allow_patterns=files, force_download=force_download, **where)
        return cls.load(folder)  # pyright: ignore[reportAttributeAccessIssue]

    def _save_pretrained(self: Any, save_directory: Path) -> None:
        self.save(save_directory)
        # What the mixin writes to config.json next, where its caller gave nothing else. The hub counts downloads by it.
        self._hub_mixin_config = {
            "library_name": "swd_lens",
            "format": FORMAT_VERSION,
            "base_model": self.provenance.get("model"),
        }

    def generate_model_card(self: Any, *args: Any, **kwargs: Any) -> ModelCard:
        """The card (README.md) of this set. Keyword arguments replace what the template would be filled with."""
        model = str(self.provenance.get("model", "an unnamed model"))
        data = ModelCardData(
            library_name="swd_lens",
            base_model=model if _REPOSITORY.fullmatch(model) else None,
            tags=self._hub_mixin_info.model_card_data.tags,
        )
        rows = [
            [f"`{site}`", *(f"{number:,}" for number in (f.d_in, f.n_units, f.d_out, f.edges)), f"{f.sparsity:.4f}"]
            for site, f in self._factors.items()  # not items(), which reads the factors
        ]
        described: dict[str, Any] = {
            "repo_id": "user/repo",
            "model": model,
            "sites": rows,
            "units": f"{self.n_units:,}",
            "edges": f"{self.edges:,}",
            "sparsity": f"{self.sparsity:.4f}",
            "version": __version__,
            "format": FORMAT_VERSION,
        }
        return ModelCard.from_template(data, template_str=CARD, **{**described, **kwargs})

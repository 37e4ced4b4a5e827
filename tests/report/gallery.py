"""Public objects as a notebook shows them: cards and figures of a small host whose sites have long names.

`python -m tests.report.gallery OUT` writes pages and screenshots, light and dark, 600, 900 and 1,400 pixels wide, for somebody to
look at; tests/report/test_cards.py measures the same pages. The objects are true results on a random model of 26 layers with the
embedded model's vocabulary; what the numbers are does not matter here.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from html import escape, unescape
from itertools import permutations
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens.circuits import Refinement
from swd_lens.study import Run
from tests.analysis.audit_models import sparse_factors
from tests.chromium import CHROMIUM

WIDTHS = (600, 900, 1400)
THEMES = ("light", "dark")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--enable-logging=stderr"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
QUIET += ["--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars"]
# In a page before anything else: whatever goes wrong, or is told to the console as an error, is kept.
RECORDER = """<script>window.complaints = [];
addEventListener("error", e => complaints.push("error: " + (e.message || e.target.outerHTML)), true);
addEventListener("unhandledrejection", e => complaints.push("rejected: " + (e.reason && e.reason.stack || e.reason)));
for (const level of ["error", "warn"]) console[level] = (...said) => complaints.push(level + ": " + said.join(" "));
</script>"""
# JupyterLab's colours and its rules for tables of outputs, which cards have to stand in.
NOTEBOOK = """
:root { --ground: #ffffff; --ink: rgba(0, 0, 0, .87); --zebra: #f5f5f5; color-scheme: light; }
:root.dark { --ground: #111111; --ink: rgba(255, 255, 255, 1); --zebra: #212121; color-scheme: dark; }
body { margin: 0; padding: 12px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
.jp-RenderedHTMLCommon table { border-collapse: collapse; border-spacing: 0; border: none; color: var(--ink);
  font-size: 12px; table-layout: fixed; margin-left: auto; margin-bottom: 1em; margin-right: auto; }
.jp-RenderedHTMLCommon thead { border-bottom: 1px solid #bdbdbd; vertical-align: bottom; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon tr { vertical-align: middle;
  padding: .5em; line-height: normal; white-space: normal; max-width: none; border: none; }
.jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) td, .jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) th {
  text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: var(--ground); }
.jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: var(--zebra); }
"""
LATE, INNER, QKV = "blocks.25.mlp_out", "blocks.25.mlp_in", "blocks.25.attn_qkv"
UNIT = f"{LATE}/5"
NAMES = ("Mary", "John", "Paul", "Karen")
PROMPTS = ("When Mary and John went to the store, John gave a drink to", "The king said that he would go to the")


class Gallery:
    """What the objects are made from, each made when it is first asked for."""

    @cached_property
    def model(self) -> Any:
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        embedded = swd.load_default_model()
        shape = {"n_layers": 26, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 160}
        config = HookedTransformerConfig(
            **shape,
            act_fn="gelu_new",
            d_vocab=embedded.cfg.d_vocab,
            normalization_type="LN",
            model_name="a small model of twenty-six layers",
            default_prepend_bos=embedded.cfg.default_prepend_bos,
        )
        model = HookedTransformer(config, tokenizer=embedded.tokenizer, move_to_device=False).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model

    @cached_property
    def text(self) -> Any:
        return swd.text_tokens(256, split="train")

    @cached_property
    def task(self) -> Any:
        prompts = [f"When {a} and {b} went to the store, {a} gave a drink to" for a, b in permutations(NAMES, 2)]
        answers, others = ([f" {pair[k]}" for pair in permutations(NAMES, 2)] for k in (0, 1))
        return swd.Task.from_prompts("who_gets_the_drink", self.model, prompts, answers, others)

    @cached_property
    def factors(self) -> Any:
        """Random factors with the settings and the provenance of true ones, and values long enough to be folded."""
        made = sparse_factors(self.model, [LATE, INNER, QKV, "blocks.24.attn_o"], units=16)
        settings = {"preset": "best", "sparsity": 0.75, "outer_iterations": 56, "seed": 0}
        origin = {"model": self.model.cfg.model_name, "tokens_sha256": "5f2b" * 16, "n_calibration_tokens": 16_384}
        return swd.FactorSet(
            {n: replace(f, settings=settings, provenance={"site": n, **origin}) for n, f in made.items()},
            {**origin, "tokens": list(range(64))},
        )

    def of(self, *sites: str) -> Any:
        return swd.FactorSet({site: self.factors[site] for site in sites}, self.factors.provenance)

    @cached_property
    def attachment(self) -> Any:
        with swd.attach(self.model, self.factors) as attachment:
            return attachment

    @cached_property
    def scores(self) -> Any:
        return swd.attribute(self.model, self.factors, self.task.train)

    @cached_property
    def curve(self) -> Any:
        return swd.evaluate(self.model, self.factors, self.task.test, self.scores)

    @cached_property
    def audit(self) -> Any:
        scores = {self.task.name: self.scores}
        heard = swd.audit(self.model, self.factors, self.text, n=4, scores=scores, progress=False)
        return heard.with_labels({UNIT: {"label": "after a verb of giving", "note": "by eye", "author": "somebody"}})

    @cached_property
    def screen(self) -> Any:
        return swd.qk_screen(self.model, self.of(QKV), top=4)

    @cached_property
    def replay(self) -> Any:
        return swd.qk_replay(self.model, self.of(QKV), self.screen.pairs(1)[0], PROMPTS[0])

    @cached_property
    def comparison(self) -> Any:
        methods = {
            "SWD s=0.75, annealed with births and deep polishing": self.of(LATE),
            "SWD s=0.75, annealed with births, no polishing": sparse_factors(self.model, LATE, units=16, seed=1),
            "neurons": swd.baselines.neurons(self.model, LATE),
            "SVD": swd.baselines.svd(self.model, LATE),
        }
        return swd.compare(self.model, methods, [self.task], tokens=self.text)

    @cached_property
    def late_scores(self) -> Any:
        return swd.attribute(self.model, self.of(LATE), self.task.train)

    @cached_property
    def edit(self) -> Any:
        return swd.edit_unit(self.model, self.of(LATE), UNIT, PROMPTS[1], " man", " woman", shift=2.0)

    @cached_property
    def sweep(self) -> Any:
        how = {"sparsities": (0.5, 0.75), "zero_data": True, "outer_iterations": 2}
        return swd.sweep(self.model, LATE, [self.task], heldout=self.text, **how)


# Name -> object; most of what swd.types names.
OBJECTS: dict[str, Callable[[Gallery], Any]] = {
    "Site": lambda g: g.attachment.sites[0],
    "TaskExample": lambda g: g.task.train.examples[0],
    "TaskSplit": lambda g: g.task.train,
    "Task": lambda g: g.task,
    "TokenStream": lambda g: swd.TokenStream(lambda: g.text, len(g.text)),
    "Estimate": lambda g: swd.estimate(g.model, "all", tokens=g.text),
    "Factors": lambda g: g.factors[LATE],
    "FactorSet": lambda g: g.factors,
    "Attachment": lambda g: g.attachment,
    "Fidelity": lambda g: swd.fidelity(g.model, g.factors, g.text),
    "UnitScores": lambda g: g.scores,
    "CostCurve": lambda g: g.curve,
    "Circuit": lambda g: g.curve.circuit(12),
    "CircuitNull": lambda g: swd.circuit_null(g.model, g.factors, g.task, g.scores, circuit=12, n=5),
    "Comparison": lambda g: g.comparison,
    "Refinement": lambda g: Refinement(
        g.curve.circuit(12),
        g.curve.circuit(5),
        {"prefix": 0.91, "refined": 0.9},
        {"prefix": 0.92, "refined": 0.9},
        pd.DataFrame(),
        0.9,
    ),
    "Screen": lambda g: swd.screen(g.model, g.task, sites="blocks.2[45].*"),
    "Audit": lambda g: g.audit,
    "UnitProfile": lambda g: g.audit.unit(UNIT),
    "UnitLabels": lambda g: g.audit.labels,
    "UnitGraph": lambda g: swd.unit_graph(g.model, g.factors, g.curve.circuit(12), prompt=PROMPTS[0]),
    "QKPair": lambda g: g.replay.pair,
    "QKScreen": lambda g: g.screen,
    "QKScan": lambda g: swd.qk_scan(g.model, g.of(QKV), list(PROMPTS), screen=g.screen, progress=False),
    "QKReplay": lambda g: g.replay,
    "Edit": lambda g: g.edit,
    "SideEffects": lambda g: swd.side_effects(g.model, g.edit, PROMPTS),
    "UnitOverlap": lambda g: swd.unit_overlap(g.model, g.of(LATE), LATE, g.text, shown=8, progress=False),
    "UnitInteractions": lambda g: swd.unit_interactions(g.model, g.of(INNER), INNER, g.text, top=6, progress=False),
    "Samples": lambda g: swd.generate(g.model, g.of(LATE), list(PROMPTS), max_new_tokens=6),
    "Sweep": lambda g: g.sweep,
    "Run": lambda g: Run({"model": g.model.cfg.model_name}, [], {"late": g.comparison}, [], 0.0),
    "FinetuneSpec": lambda g: swd.types.FinetuneSpec(),
    "figure of an audit": lambda g: g.audit.plot(),
    "panel of a replay": lambda g: g.replay.panel(),
}


@cache
def gallery() -> Gallery:
    """The one of this process."""
    return Gallery()


@cache
def make(name: str) -> Any:
    """An object of the gallery, made once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a random model: margins that are not positive
        return OBJECTS[name](gallery())


# ---------------------------------------------------------------------------------------------- pages


def html_of(shown: Any) -> str:
    """What a notebook puts into an output area."""
    return shown._repr_html_() if hasattr(shown, "_repr_html_") and shown._repr_html_() else shown._repr_svg_()


def page(html: str, theme: str, title: str = "an output") -> str:
    """An output in a notebook's page."""
    return (
        f'<!doctype html><html lang="en" class="{theme}"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{NOTEBOOK}</style></head><body><div class="jp-RenderedHTMLCommon">{html}</div></body></html>'
    )


def run_chromium(profile: Path, options: list[str], page: Path | str) -> subprocess.CompletedProcess[str]:
    """Headless Chromium without a network, on a file or an address."""
    address = page if isinstance(page, str) else page.as_uri()
    command = [CHROMIUM or "chromium", *QUIET, f"--user-data-dir={profile}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)


def found_by(done: subprocess.CompletedProcess[str]) -> Any:
    """What a page's script has put into <pre id=found>, as JSON."""
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-3000:]
    return json.loads(unescape(found[1]))


def main(out: Path, only: list[str]) -> None:
    """Write OUT/NAME.THEME.html and OUT/NAME.THEME.WIDTH.png."""
    out.mkdir(parents=True, exist_ok=True)
    for name in only or OBJECTS:
        shown = make(name)
        html = html_of(shown)
        print(f"{name}: {len(html):,} bytes, repr of {len(repr(shown).splitlines())} lines")
        for theme in THEMES:
            file = out / f"{name.replace(' ', '_')}.{theme}.html"
            file.write_text(page(html, theme), encoding="utf-8")
            for width in WIDTHS:
                picture = file.with_suffix(f".{width}.png")
                options = [f"--window-size={width},1100", f"--screenshot={picture}", "--virtual-time-budget=8000"]
                run_chromium(out / "profile", options, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])

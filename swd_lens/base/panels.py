"""Interactive panels by CircuitsVis, from the script that its package brings along; nothing is loaded from a network.

1. `attention_heads` turns patterns into a `Panel`: a placeholder, its data as JSON, and a call of CircuitsVis. Small heat maps,
   one per head; a click, or Enter on a focused one, keeps a head in full size.
2. A page holds `library()` once, before its panels (`Panel.html`). So does a notebook where the front end says which cell is
   run (JupyterLab, VS Code): the first cell that shows a panel brings the script along, and again when it is run again; the
   others wait for it, and say so where it does not come. Elsewhere (Colab draws every cell in a page of its own) each brings it.
3. Beside every panel stands the same in words, for those who cannot see it and where no script runs.

CircuitsVis' own display asks google.com whether there is a network and then loads a script from a CDN; and it does not escape
"</script>" in token text. Here JSON lies in an element of its own with every "<" escaped.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import legible, visible, visible_token
from swd_lens.base.figures import ATTENTION, NEGATIVE, POSITIVE
from swd_lens.base.progress import ipython

_DIGITS = 4  # of a pattern's entries: finer than any screen shows
# CircuitsVis draws for a white page, and labels heads in white on a colour of their own, some too light to read.
_STYLE = (
    ".swd-cv { background: #fff; color: #222; } .swd-cv h2, .swd-cv h4 { background: #fff !important; color: #222 !important; }"
)
# CircuitsVis' thumbnails listen to the mouse alone. Keyboards get them as buttons, named after their heads.
_CALL = """
(() => {
  const draw = box => {
    const target = box.querySelector(".swd-cv"), kind = box.dataset.swdPanel;
    box.dataset.drawn = "";
    window.swdPanels = (window.swdPanels || 0) + 1;
    target.id = "swd-panel-" + window.swdPanels;
    const props = JSON.parse(box.querySelector("script[type='application/json']").textContent);
    try { CircuitsVis.render(target.id, CircuitsVis[kind], props); } catch (error) {
      target.textContent = "This panel could not be drawn (" + error.message + "). Below it stands in words.";
      return;
    }
    const adapt = () => {
      target.querySelectorAll("h2, h3, h4").forEach(plain);
      target.querySelectorAll("canvas").forEach(reachable);
    };
    // Headings of its own would stand among the page's. Who hears the page is told which head is shown.
    const plain = heading => {
      if (heading.getAttribute("role") === "presentation") return;
      heading.setAttribute("role", "presentation");
      if (heading.textContent.includes("Zoomed")) heading.setAttribute("aria-live", "polite");
    };
    const reachable = canvas => {
      canvas.setAttribute("aria-hidden", "true");
      const head = clickable(canvas, target);
      if (!head || head.tabIndex === 0) return;
      head.tabIndex = 0;
      head.setAttribute("role", "button");
      head.setAttribute("aria-label", head.textContent.trim() || "head");
      head.addEventListener("keydown", event => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); }
      });
    };
    new MutationObserver(adapt).observe(target, { childList: true, subtree: true });
    adapt();
  };
  const clickable = (canvas, end) => {
    for (let at = canvas; at && at !== end; at = at.parentElement) {
      const key = Object.keys(at).find(k => k.startsWith("__reactProps"));
      if (key && at[key].onClick) return at;
    }
    return null;
  };
  const waiting = () => document.querySelectorAll("[data-swd-panel]:not([data-drawn])");
  const missing = box => {
    box.querySelector(".swd-cv").textContent = "The script that draws this panel came with the notebook's first panel: "
      + "run that cell again, or restart. Below it stands in words.";
    box.querySelector("details").open = true;
  };
  // On a page that opens, the cell that brings the script may be drawn after this one.
  const ready = tries => {
    if (window.CircuitsVis) waiting().forEach(draw);
    else if (tries > 0) setTimeout(() => ready(tries - 1), 250);
    else waiting().forEach(missing);
  };
  ready(20);
})();
"""


@dataclass(frozen=True)
class Panel:
    """One interactive panel. html: the element that draws itself; a page puts `library()` once before all of them."""

    html: str

    def _repr_html_(self) -> str:
        # The front end's name for the cell that is run; None outside a notebook, and where cells share no page.
        cell, shell = None, ipython()
        if "google.colab" not in sys.modules and hasattr(shell, "get_parent"):
            cell = (shell.get_parent() or {}).get("metadata", {}).get("cellId")
        if cell is not None and not _CARRIERS:
            _CARRIERS.append(cell)
        return (library() if cell is None or cell in _CARRIERS else "") + self.html


_CARRIERS: list[str] = []  # the cell of this process's notebook that brought the script along


@cache
def library() -> str:
    """CircuitsVis as one <script> element (1.3 MB) with a line of style before it, for a page to hold once. Raises
    ImportError: circuitsvis is not installed, or came without its script."""
    try:
        import circuitsvis
    except ImportError:
        raise ImportError("interactive panels are drawn by CircuitsVis; pip install circuitsvis") from None
    script = Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js"
    if not script.is_file():
        raise ImportError(f"{legible(script)} is missing; install circuitsvis 1.43 or later again")
    text = script.read_text(encoding="utf-8")
    # The one "</script" in it is in a string, where "<\/script" means the same. Its source map is not part of the page, and
    # as a plain script a page that has it already would complain of a second "var".
    text = text.replace("</script", "<\\/script").replace("//# sourceMappingURL=iife.js.map", "")
    return f"<style>{_STYLE}</style><script>if (!window.CircuitsVis) {{ {text}\nwindow.CircuitsVis = CircuitsVis; }}</script>"


def attention_heads(
    tokens: Sequence[str],
    attention: Float[Tensor, "head dest src"],
    *,
    names: Sequence[str] | None = None,
    title: str = "Attention",
    strongest: int = 3,
    largest: float | int | None = None,
    signed: bool | None = None,
    later: bool = False,
) -> Panel:
    """CircuitsVis' attention heads: hover shows values, a click keeps a head in full size.

    Args:
        tokens: strings of the positions; shown as they are, line ends and spaces made visible.
        attention: probabilities or signed values (contributions, differences); a destination sees no later source, else the
            upper triangle is shown as well.
        names: of the heads; "head 0" ... where None.
        title: what the panel shows, for its heading and for screen readers.
        strongest: how many entries per head the description in words lists.
        largest: the value of the full colour; None = the largest |value| shown.
        signed: blue and orange for the two signs, else green; None = signed where an entry is negative.
        later: do not draw when the page is read; a script of the page takes `data-drawn` off and runs the panel's when it is
            time (a page with a hundred canvases opens slowly).

    Raises ValueError: tokens, names and attention do not fit each other, or an entry is not finite.
    """
    n_heads, dest, src = attention.shape
    names = [f"head {i}" for i in range(n_heads)] if names is None else [visible(str(name)) for name in names]
    if not (len(tokens) == dest == src and len(names) == n_heads):
        raise ValueError(
            f"attention is {tuple(attention.shape)} (head, dest, src), but there are {len(tokens)} tokens and {len(names)} names"
        )
    values = attention.detach().float().cpu()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("attention holds values that are not finite (masked scores?); give probabilities or zeros there")
    shown = [visible_token(token) for token in tokens]
    causal = bool((values.triu(1) == 0).all())
    scale = float(values.abs().max()) or 1.0 if largest is None else float(largest)
    signed = bool((values < 0).any()) if signed is None else signed
    props = {
        "attention": [[[round(v, _DIGITS) for v in row] for row in head] for head in values.tolist()],
        "tokens": shown,
        "attentionHeadNames": names,
        "maxValue": scale,
        "minValue": -scale,
        "positiveColor": POSITIVE if signed else ATTENTION,
        "negativeColor": NEGATIVE,
        "maskUpperTri": causal,
    }
    items = []
    for name, head in zip(names, values, strict=True):
        flat = head.abs().flatten()
        order = torch.sort(flat, descending=True, stable=True).indices[:strongest].tolist()
        places = [(i // head.shape[1], i % head.shape[1]) for i in order if flat[i] > 0]
        said = [f"{shown[t]} ({t}) from {shown[u]} ({u}): {float(head[t, u]):.{_DIGITS - 1}g}" for t, u in places]
        items.append(f"<li>{escape(name)}: {escape('; '.join(said)) or 'nothing'}</li>")
    words = f"<p>Largest entries, destination (position) from source (position):</p><ul>{''.join(items)}</ul>"
    data = json.dumps(props, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    heading, later_ = escape(visible(title)), " data-drawn" if later else ""
    return Panel(
        f'<div{later_} data-swd-panel="AttentionHeads" role="group" aria-label="{heading}" class="swd-panel" '
        f'style="overflow-x:auto">'
        f'<p><b>{heading}</b></p><div class="swd-cv"></div>'
        f'<script type="application/json">{data}</script><script>{_CALL}</script>'
        f"<details><summary>{heading}, in words</summary>{words}</details></div>"
    )

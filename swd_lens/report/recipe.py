"""Code a reader can paste: how to load the factors of a run, and how to run it again, with every setting written out."""

from typing import Any

from swd_lens.report.wording import main_replacement
from swd_lens.study import Run
from swd_lens.study.run import folders_of

DEFAULT_MODEL = "swd-lens-default"


def load_code(run: Run) -> str:
    """Load the main replacement's factors and read its units in a forward pass."""
    r = main_replacement(run)
    if r is None or r.exact:  # exact factors are not saved
        return ""
    folder = next(name for other, name in zip(run.replacements, folders_of(run.replacements), strict=True) if other is r)
    site = next(iter(r.factors))
    layer, kind = site.split(".")[1:]
    return "\n".join(
        [
            "import swd_lens as swd",
            "",
            _model_line(run),
            f"factors = swd.FactorSet.load({folder!r})",
            "with swd.attach(model, factors):",
            '    logits, cache = model.run_with_cache("The list is")',
            f'    z = cache["{kind}_unit", {layer}]  # (batch, pos, unit) of {site}',
        ]
    )


def run_code(run: Run) -> str:
    """The call that makes this run again."""
    s = run.settings
    # The whole spec, where the run has it: what the code left out would mean something else once a default changes.
    solver = {"calibration": s["calibration"]} if s.get("calibration") not in (None, "zero-data") else {}
    solver |= {**dict(s.get("solver spec", {})), **dict(s.get("solver", {}))}
    lines = [
        "import swd_lens as swd",
        *(["import torch"] if "float64" in str(s.get("calibration dtype")) else []),
        "from swd_lens.report import write_report",
        "",
        _model_line(run),
        "run = swd.run_study(",
    ]
    surfaces, tasks = dict(s.get("surfaces", {})), dict(s.get("tasks", {}))
    lines += ["    model,", "    {"]
    lines += [f"        {label!r}: {list(sites)!r}," for label, sites in surfaces.items()]
    lines += ["    },", "    ["]
    splits = ("train", "validation", "test")
    for name, task in tasks.items():
        sizes = [f"n_{split}={task[split]}" for split in splits if task.get(split) is not None]
        lines.append(f"        swd.load_task({', '.join([repr(name), 'model', *sizes])}),")
    lines += ["    ],", f"    sparsities={s.get('sparsities', [])!r},"]
    lines += [_tokens_line(run, "calibration", "train"), _tokens_line(run, "held-out", "test")]
    if s.get("calibration dtype") == "float64" and s.get("model") == DEFAULT_MODEL:
        lines.append(f"    calibration_model={_load_default(run, dtype=True)},")
    if s.get("factors"):
        named = zip(run.replacements, folders_of(run.replacements), strict=True)
        loads = {r.method: f"swd.FactorSet.load({name!r})" for r, name in named if r.method in s["factors"]}
        lines += ["    factors={", *(f"        {label!r}: {load}," for label, load in loads.items()), "    },"]
    # Controls that were left out would by name be refused, as by default they are not.
    named = ("random_b_seeds", "positions", "ablation", *([] if s.get("controls left out") else ["controls"]))
    lines += [f"    {name}={s[name]!r}," for name in named if name in s]
    lines += [f"    {key}={value!r}," for key, value in solver.items()]
    return "\n".join([*lines, ")", 'write_report(run, "report.html")'])


def _model_line(run: Run) -> str:
    name = run.settings.get("model", "")
    if name == DEFAULT_MODEL:
        return f"model = {_load_default(run)}"
    load = ", ".join(["name_or_folder", *_kind(run)])
    return f"model = ...  # {' '.join(str(name).split())}: swd.load_host({load})"


def _load_default(run: Run, dtype: bool = False) -> str:
    return f"swd.load_default_model({', '.join([*(['dtype=torch.float64'] if dtype else []), *_kind(run)])})"


def _kind(run: Run) -> list[str]:
    """The argument that asks for a bridge, where the run was made on one."""
    return ['kind="bridge"'] if run.settings.get("host") == "TransformerBridge" else []


def _tokens_line(run: Run, name: str, split: str) -> str:
    argument = name.replace("-", "") + "_tokens"
    n: Any = run.settings.get(f"{name} tokens", 0)
    if not n:
        return f"    {argument}=None,"
    if run.settings.get("model") == DEFAULT_MODEL:
        return f"    {argument}=swd.text_tokens({n}, split={split!r}),"
    return f"    {argument}=...,  # {n:,} token ids, (rows, pos)"

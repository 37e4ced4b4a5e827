"""paper: the paper's tables and figures, each by one command; what they would cost; one page of all."""

import json
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from typer import Argument, Option

from swd_lens.base.files import plain
from swd_lens.base.progress import duration
from swd_lens.cli.baselines import parsed_settings
from swd_lens.cli.options import HostOption, OutputOptions, OverwriteOption, app, command, plan, say, show
from swd_lens.hosts.embedded import load_default_model
from swd_lens.hosts.load import load_host
from swd_lens.report.paper import write_paper_report
from swd_lens.report.terminal import table
from swd_lens.study import paper as items
from swd_lens.study.paper.costs import SHAPES
from swd_lens.study.paper.run import items_named

_ALL, _REPORT = "all", "report"


@command(app, goes_on=True)
def paper(
    item: Annotated[
        str | None,
        Argument(metavar="ITEM", help="An item, 'all', or 'report' (with its folder). Without one the items are listed."),
    ] = None,
    folder: Annotated[Path | None, Argument(metavar="DIR", help="Of 'report': the folder of finished items.")] = None,
    *,
    profile: Annotated[str, Option(help=f"Settings: {', '.join(items.PROFILES)}.")] = "small",
    model: Annotated[str | None, Option("--model", help="In place of the profile's: a name, a folder, or a GGUF file.")] = None,
    host: HostOption = "auto",
    text: Annotated[
        str | None, Option(help="In place of the profile's: a text file, or the name of a text ('sotu', 'fineweb-edu').")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of all items; what they share is made once.")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="A setting in place of the profile's, as JSON or plain text; repeatable."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print every setting and the cost; do nothing.")] = False,
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """The paper's tables and figures, each by one command: ITEM, all, or a report of what a folder holds."""
    if item is None:
        settings_of_all = [items.settings_of(name, profile) for name in items_named(_ALL, profile)]
        rows = pd.DataFrame({"item": s.item, "asks": s.question, "section": s.section} for s in settings_of_all)
        profiles = pd.DataFrame({"profile": list(items.PROFILES), "settings": list(items.PROFILES.values())})
        values = {"items": rows.to_dict("records"), "profiles": dict(items.PROFILES)}
        printed.show(values, table("Items of the paper", rows), table("Profiles", profiles))
        return
    if item == _REPORT:
        if folder is None:
            raise ValueError("report needs the folder of finished items: swd-lens paper report DIR")
        path = write_paper_report(folder)
        show(printed.as_json, {"report": str(path)}, f"The report is in {path} ({path.stat().st_size / 1e6:.1f} MB).")
        return
    values = parsed_settings(settings)
    if dry_run:
        # A model that no profile names has to be loaded, to know its sizes.
        known = model is None or model in SHAPES
        planned = items.plan(item, profile, model if known else _load(str(model), host), **values)
        lines = []
        for each in planned.settings:
            lines.append(f"\n{each.item}: {each.question}")
            # A setting on two lines: its value, with the paper's where that is another and the section; and what it is.
            for row in each.table().to_dict("records"):
                paper_has = f" (paper: {row['paper']})" if row["paper"] else ""
                source = f"  [{row['source']}]" if row["source"] else ""
                lines += [f"  {row['setting']} = {row['value']}{paper_has}{source}", f"      {row['about']}"]
        costs = planned.table().drop(columns=["asks", "section"])
        costs["time"] = [duration(60 * minutes) for minutes in costs.pop("minutes")]
        note = "Estimates from shapes, good to a factor of three; each item alone. In one folder they share factors and passes."
        printed.show(planned.as_dict(), *lines, table(f"Cost, profile {profile}", costs.round(2)), note)
        return
    if out is None:
        raise ValueError("--out says where the items go; --dry-run shows what they would do")
    names = items_named(item, profile)
    first = items.plan(item, profile, **values).settings[0]  # a bad item or setting fails here, before anything is loaded
    steps = plan("load", *names, "write", complete=True)
    say(f"load {model or first['model']}")
    loaded = _load(model or first["model"], host)
    how: dict[str, Any] = {"text": text, "overwrite": overwrite, "on_step": steps, "progress": True}
    results = items.run_items(names, out=out, profile=profile, model=loaded, **how, **values)
    say("write the page of all items")
    path = write_paper_report(out)
    printable = {name: json.loads(json.dumps(plain(result.as_dict()))) for name, result in results.items()}
    words = [line for result in results.values() for line in (f"\n{result.title()}", *result.findings)]
    printed.show(printable, *words, f"\nEverything is in {out}; the page is {path}.")


def _load(name: str, host: str) -> Any:
    return load_default_model(kind=host) if name == "default" else load_host(name, host)

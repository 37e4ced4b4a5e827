"""Every error is declared once (swd_lens/*/errors.toml), raised with its fields, and does what it says.

1. Statically: names that are raised are declared, with the fields of their message; what is declared is raised; no message
   stands in code.
2. Every declaration with a remedy has triggers (tests/errors/): a call that raises its class with its message.
3. The catalogue, swd_lens/ERRORS.md, is what the declarations make it.
"""

import ast
import importlib
import re
import string
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import swd_lens as swd
from swd_lens.base import errors
from swd_lens.base.errors import class_named, declarations, error, section_texts, warning
from tests import catalogue
from tests.errors.triggers import ALSO, NEEDS_HOOKED, TRIGGERS

HOOKED = int(metadata.version("transformer_lens").split(".")[0]) < 4
PACKAGE = Path(swd.__file__).parent
for _file in sorted((Path(__file__).parent / "errors").glob("[a-z]*.py")):
    importlib.import_module(f"tests.errors.{_file.stem}")

# Messages outside of the declarations: what Python's protocol of module attributes asks for, an error that carries another one's
# words, and the reasons for which one example of a task is left out (TaskError quotes them).
_UNDECLARED = ("AttributeError", "kind", "type(cause)", "type(error)", "Unusable")


def fields_of(message: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(message) if name is not None}


def calls() -> list[tuple[str, ast.Call]]:
    """(file:line, call) of every `error(...)` and `warning(...)` in the package."""
    made = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file != Path(errors.__file__):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in ("error", "warning")
                ):
                    made.append((f"{file.relative_to(PACKAGE)}:{node.lineno}", node))
    return made


# ---------------------------------------------------------------------------------------------- statically


def test_what_is_raised_is_declared_with_the_fields_of_its_message():
    wrong = []
    for place, call in calls():
        name = call.args[0].value if len(call.args) == 1 and isinstance(call.args[0], ast.Constant) else None
        if name not in declarations():
            wrong.append(f"{place}: {name!r} is not declared")
            continue
        given = {keyword.arg for keyword in call.keywords} - {"raised_as"}
        if given != fields_of(declarations()[name]["message"]):
            wrong.append(f"{place}: {name} takes {sorted(fields_of(declarations()[name]['message']))}")
        kinds = declarations()[name]["raises"]
        if isinstance(kinds, list) != any(keyword.arg == "raised_as" for keyword in call.keywords):
            wrong.append(f"{place}: {name} raises one of {kinds}, so the call must say which, and no other may")
        if call.func.id == "warning" and not issubclass(class_named(kinds), Warning):  # type: ignore[attr-defined]
            wrong.append(f"{place}: {name} is no warning")
    assert not wrong, "\n".join(wrong)


def test_what_is_declared_is_raised_where_it_is_declared():
    raised: dict[str, set[str]] = {}
    for place, call in calls():
        raised.setdefault(ast.literal_eval(call.args[0]), set()).add(place.split("/")[0])
    unused = [name for name in declarations() if name not in raised]
    elsewhere = [
        name for name, entry in declarations().items() if entry["room"] not in raised.get(name, {entry["room"]})
    ]
    assert not unused and not elsewhere


def test_no_message_stands_in_code():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(raised, ast.Call) or not any(
                isinstance(arg, ast.Constant | ast.JoinedStr) for arg in raised.args
            ):
                continue
            name = ast.unparse(raised.func)
            stands = (isinstance(node, ast.Raise) or name == "warnings.warn") and name != "error"
            if stands and name not in _UNDECLARED and not name.startswith(("self._", "_", "typer.")):
                found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:120]}")
    assert not found, "\n".join(found)


def test_names_are_unique_and_classes_exist():
    names = [
        name
        for file in sorted(PACKAGE.glob("*/errors.toml"))
        for name in re.findall(r"^\[[a-z0-9-]+\.([a-z0-9-]+)\]$", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) == len(set(names)) == len(declarations()) > 500
    for name, entry in declarations().items():
        kinds = entry["raises"] if isinstance(entry["raises"], list) else [entry["raises"]]
        assert kinds and all(issubclass(class_named(kind), Exception) for kind in kinds), name
        assert set(entry) - {"remedy"} == {"raises", "message", "section", "room"}, name
    assert {entry["section"] for entry in declarations().values()} == set(section_texts())


def test_making_a_message_never_fails():
    assert str(error("no-such-site", pattern="x")).startswith("no site matches 'x'. Nearest: {nearest}.")
    assert isinstance(error("nothing-is-called-so", a=1), RuntimeError)
    assert str(error("undefined-sufficiency", task="t", margin=None)).startswith(
        "the mean margin of 't' with all units is None, not positive"
    )
    assert isinstance(warning("few-tokens"), UserWarning) and isinstance(warning("no-such-site"), UserWarning)
    raised = error("setting-out-of-range", raised_as=errors.FinetuneError, name="steps", value=0, expected="1 or more")
    assert type(raised) is errors.FinetuneError


# ---------------------------------------------------------------------------------------------- triggers


def test_every_declaration_with_a_remedy_has_a_trigger():
    with_remedy = {name for name, entry in declarations().items() if "remedy" in entry}
    triggered = {ALSO.get(name, name) for name in TRIGGERS}
    assert triggered <= set(declarations()) and with_remedy <= triggered, (
        sorted(triggered - set(declarations())),
        sorted(with_remedy - triggered),
    )


def pattern_of(message: str) -> str:
    """A regular expression of the messages that a declaration makes."""
    parts = string.Formatter().parse(message)
    return "".join(re.escape(text) + (".*?" if name is not None else "") for text, name, _, _ in parts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(name in NEEDS_HOOKED and not HOOKED, reason="needs a HookedTransformer")
        )
        for name in sorted(TRIGGERS)
    ],
)
def test_a_trigger_raises_what_is_declared(name, tmp_path, monkeypatch):
    entry = declarations()[ALSO.get(name, name)]
    kinds = entry["raises"] if isinstance(entry["raises"], list) else [entry["raises"]]
    expected = tuple(class_named(kind) for kind in kinds)
    if issubclass(expected[0], Warning):
        with pytest.warns(expected[0]) as caught:
            TRIGGERS[name](tmp_path, monkeypatch)
        message = next(str(each.message) for each in caught if each.category is expected[0])
    else:
        with warnings.catch_warnings(), pytest.raises(expected) as raised:
            warnings.simplefilter("ignore")
            TRIGGERS[name](tmp_path, monkeypatch)
        assert raised.type in expected, f"raised a {raised.type.__name__}"
        # str of a KeyError is the repr of its message.
        message = raised.value.args[0] if raised.type is KeyError else str(raised.value)
    # A path or a site may stand in front.
    assert re.fullmatch(f"(.*: )?{pattern_of(entry['message'])}", message, re.DOTALL), (
        f"\n{entry['message']}\n{message}"
    )


# ---------------------------------------------------------------------------------------------- the catalogue


def test_the_catalogue_is_fresh():
    """`python -m tests.catalogue` writes it."""
    assert (PACKAGE / "ERRORS.md").read_text(encoding="utf-8") == catalogue.page()

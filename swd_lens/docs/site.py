"""Hooks of the documentation site (mkdocs.yml): pages that are made of the package itself.

1. One reference page for each public name of swd_lens, from its docstring, with a link to where it is defined; the build ends
   where a public name has no docstring, where one that raises has no "Raises:", where an array has no shape (jaxtyping, or
   words), and where a function does not say whose method it is: the paper's, somebody's, or ours.
2. Pages that live elsewhere in the repository: MODELS.md, CHANGELOG.md, RESULTS.md. Links out of them lead to the repository.
3. One page for each notebook, with the outputs that it is committed with. What an output shows as HTML or SVG goes into the page
   after everything else is made of it (`on_post_page`), so that neither Markdown nor the search index sees it.
"""

import ast
import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[1]
REPOSITORY = "https://github.com/swd-lens/swd_lens/blob/main"
COPIED = {
    "models.md": PACKAGE / "MODELS.md",
    "changelog.md": PACKAGE / "CHANGELOG.md",
    "results.md": PACKAGE.parent / "tests" / "benchmarks" / "RESULTS.md",
}
PICTURES = PACKAGE.parent / ".github" / "readme"  # of the README; pages show them, too
NOTEBOOKS = sorted((PACKAGE.parent / "notebooks").glob("*.ipynb"))
GROUPS = {"PUBLIC": "The calls", "ALIASES": "Further calls", "TYPES": "Results", "ERRORS": "Errors and warnings"}
SPACES = "Namespaces"


def public_names() -> dict[str, dict[str, str]]:
    """Group -> name -> module that defines it, read from swd_lens/__init__.py without importing it."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    groups, spaces = {}, {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in GROUPS:
            groups[node.targets[0].id] = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMESPACES":
            spaces = ast.literal_eval(node.value)
    groups["PUBLIC"].pop("__version__", None)
    known = {name for homes in groups.values() for name in homes}
    own = {name: home for space in spaces.values() for name, home in _names_of(space).items() if name not in known}
    return {**groups, SPACES: own}


def _names_of(space: str) -> dict[str, str]:
    """Name -> module that defines it, of the public names that a namespace imports."""
    tree = ast.parse(source_of(space).read_text(encoding="utf-8"))
    names = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("swd_lens."):
            names |= {alias.name: node.module.removeprefix("swd_lens.") for alias in node.names}
    return names


def source_of(home: str) -> Path:
    path = PACKAGE / home.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# Whose method a function is, as its docstring says it. Those that read, write and look up have none.
SOURCE = re.compile(
    r"paper|method\.md|\bours\b|RESULTS\.md|tests/benchmarks|TransformerLens|SAELens|circuit-tracer|\(\d{4}\)|https?:"
)
NO_METHOD = {"load_default_model", "find_sites", "text_tokens", "stream_rows", "detach", "dashboard", "draw", "save_checkpoint"}
_ARRAY, _SHAPED = re.compile(r"\bTensor\b|\bndarray\b"), re.compile(r"\b(?:Float|Int|Bool|Shaped|Num)\[")


def shapes_missing(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Arrays of a public function, or of a class' fields and methods, whose shape neither jaxtyping nor the docstring gives."""
    about = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        annotated = [(each.arg, each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)] + [
            ("returns", node.returns)
        ]
    else:
        annotated = [(ast.unparse(each.target), each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)]
    missing = []
    for name, annotation in annotated:
        kind = "" if annotation is None else ast.unparse(annotation)
        if not _ARRAY.search(kind) or _SHAPED.search(kind) or name.startswith("_") or "Sequence" in kind:
            continue
        said = re.search(rf"\b{name}\b[^.]*?\(\w+,[\w, ]*\)", about) or (
            name == "returns" and re.search(r"\(\w+,[\w, ]*\)|shape", about)
        )
        missing += [] if said else [f"{node.name}: {name}: {kind}"]
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
        missing += [f"{node.name}.{words}" for method in methods for words in shapes_missing(method)]
    return missing


def require_documented(home: str, name: str) -> None:
    """End the build where the docstring of a public name lacks what this module's says.

    Raises:
        PluginError: it does; the message says what is missing.
    """
    for node in ast.parse(source_of(home).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or ""
            raises = isinstance(node, ast.FunctionDef) and any(isinstance(each, ast.Raise) for each in ast.walk(node))
            if not text:
                raise PluginError(f"{home}.{name} is public and has no docstring")
            if raises and "Raises:" not in text:
                raise PluginError(f"{home}.{name} raises and its docstring has no 'Raises:'")
            if missing := shapes_missing(node):
                raise PluginError(f"{home}.{name}: no shape is given of {'; '.join(missing)}")
            if isinstance(node, ast.FunctionDef) and name not in NO_METHOD and not SOURCE.search(text):
                raise PluginError(f"{home}.{name} does not say whose method it is (the paper's, somebody's, ours)")


def reference_pages() -> dict[str, str]:
    """Path of a page -> its text: one for each call and result, one for all errors, and a list."""
    pages, lines = {}, ["# Reference", "", "Every public name, as its docstring says it.", ""]
    for group, homes in public_names().items():
        lines += [f"## {GROUPS.get(group, group)}", ""]
        for name, home in sorted(homes.items(), key=lambda item: item[0].lower()):
            require_documented(home, name)
            page = "errors" if group == "ERRORS" else name
            lines.append(f"- [`{name}`]({page}.md)")
            if page == "errors":
                pages.setdefault("reference/errors.md", "# Errors and warnings\n")
                pages["reference/errors.md"] += f"\n::: swd_lens.{home}.{name}\n"
            else:
                path = source_of(home).relative_to(PACKAGE.parent)
                defined = f"Defined in [{path}]({REPOSITORY}/{path})."
                pages[f"reference/{page}.md"] = f"::: swd_lens.{home}.{name}\n    options:\n      heading_level: 1\n\n{defined}\n"
        lines.append("")
    return {"reference/index.md": "\n".join(lines), **pages}


def copied_page(source: Path) -> str:
    """The text of a document of the repository, with links that work on the site."""
    return _with_links(source.read_text(encoding="utf-8"), source)


def _with_links(text: str, source: Path, up: str = "") -> str:
    """Markdown of a document, or of a notebook, whose page lies as far down as `up` leads up."""
    folder = source.parent.relative_to(PACKAGE.parent)

    def elsewhere(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target or target.startswith("#"):
            return match[0]
        for page, document in COPIED.items():
            if target.partition("#")[0].endswith(document.name):
                return f"]({up}{page}{target[target.find('#') :] if '#' in target else ''})"
        path = (PACKAGE.parent / folder / target).resolve().relative_to(PACKAGE.parent.resolve())
        return f"]({REPOSITORY}/{path})"

    return re.sub(r"\]\(([^)\s]+)\)", elsewhere, text)


# ---------------------------------------------------------------------------------------------- notebooks

_OUTPUTS: dict[str, str] = {}  # placeholder -> what stands there in the finished page
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and of its outputs text, or a placeholder for HTML and SVG."""
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_with_links(source, path, "../"))
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output, f"{path.stem}-{number}-{i}") for i, output in enumerate(cell["outputs"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any], name: str) -> str:
    data = output.get("data", {})
    shown = next((data[kind] for kind in ("text/html", "image/svg+xml") if kind in data), None)
    if shown is not None:
        placeholder = f"swd-output-{name}"
        _OUTPUTS[placeholder] = f'<div class="swd-output" style="overflow-x:auto">{"".join(shown)}</div>'
        return f'<div id="{placeholder}"></div>'
    text = _ANSI.sub("", "".join(output.get("text", data.get("text/plain", ""))))
    return f'<pre class="swd-output"><code>{html.escape(text.rstrip())}</code></pre>' if text.strip() else ""


def notebook_pages() -> dict[str, str]:
    return {f"notebooks/{path.stem}.md": notebook_page(path) for path in NOTEBOOKS}


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Put the notebooks' outputs in the places that were kept for them."""
    return re.sub(r'<div id="(swd-output-[\w-]+)"></div>', lambda match: _OUTPUTS[match[1]], output)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {**reference_pages(), **notebook_pages(), **{page: copied_page(source) for page, source in COPIED.items()}}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in PICTURES.glob("*.svg"):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links to the repository's pictures, which GitHub follows as they stand, lead to the site's copies."""
    depth = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+\.github/readme/", f"]({depth}pictures/", markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the reference pages where the navigation says "reference/", the notebooks where it says "notebooks/"."""
    pages = [{Path(page).stem: page} for page in reference_pages() if not page.endswith("index.md")]
    made = {"reference/": ["reference/index.md", *pages], "notebooks/": list(notebook_pages())}

    def listed(item: Any) -> Any:
        [(name, where)] = item.items() if isinstance(item, dict) else [("", "")]
        return {name: made[where]} if isinstance(where, str) and where in made else item

    config.nav = [listed(item) for item in config.nav or []]
    return config

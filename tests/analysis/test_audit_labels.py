"""The export for a labelling model, and labels on their way back: round trips, and what is refused."""

import json
import warnings

import pytest

from swd_lens.analysis.audit import UnitLabel, UnitLabels, audit
from swd_lens.base.errors import UnsealedFileWarning
from tests.analysis.audit_models import lettered, made_scores, sparse_factors
from tests.micro import random_tokens
from tests.refusals import refuses

SITE = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def found(model):
    factors = sparse_factors(model, "mlp_out")
    return audit(model, factors, random_tokens(9, 8), n=3, scores=made_scores(factors), progress=False)


@pytest.fixture(scope="module")
def other(model):
    return audit(model, sparse_factors(model, "mlp_out", seed=1), random_tokens(9, 8), n=3, progress=False)


def test_an_export_holds_what_the_profiles_hold(found, tmp_path):
    path = found.export(tmp_path / "units.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(list(line)[-1] == "sha256" for line in lines)
    assert [line["unit"] for line in lines] == found.units
    for line, profile in zip(lines, found.profiles(), strict=True):
        assert (line["site"], line["index"]) == (profile.site, profile.index)
        assert line["label"] == "" and line["factors"] == found.identities[profile.site]
        assert len(line["contexts"]) == len(profile.contexts)
        for written, context in zip(line["contexts"], profile.contexts, strict=True):
            assert (tuple(written["tokens"]), written["peak"]) == (context.tokens, context.peak)
            assert written["z"] == pytest.approx(context.z, rel=1e-4)
            assert written["text"] == context.text(("<<", ">>")) and written["text"].count("<<") == 1
        assert tuple(map(tuple, line["promoted"])) == profile.logits.promoted
        assert line["statistics"]["density"] == profile.density and line["reads"]["n"] == profile.reads.n
    # A labelling model must not see what a unit is good for.
    assert "a task" not in path.read_text(encoding="utf-8")


def test_a_filled_in_export_becomes_labels(found, tmp_path):
    path = found.export(tmp_path / "units.jsonl", units=[f"{SITE}/3", f"{SITE}/4", f"{SITE}/5"])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[0] |= {"label": " years ", "note": "in both centuries", "author": "a model"}
    lines[1] |= {"label": "names"}
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    labels = UnitLabels.load(path)
    assert labels[f"{SITE}/3"] == UnitLabel("years", "in both centuries", "a model") and len(labels) == 2
    labelled = found.with_labels(labels)
    assert labelled.unit(f"{SITE}/3").label == labels[f"{SITE}/3"] and labelled.unit(f"{SITE}/5").label is None
    again = labelled.export(tmp_path / "again.jsonl")
    assert dict(UnitLabels.load(again)) == dict(labels)


def test_an_export_may_be_filled_in_by_any_tool_and_not_changed(found, tmp_path):
    path = found.export(tmp_path / "units.jsonl", units=[f"{SITE}/3"])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # JavaScript knows one kind of number; keys come in any order; some editors put a mark in front of a file.
    other = {k: v for k, v in reversed(lines[0].items())} | {"label": "years", "statistics": dict(lines[0]["statistics"])}
    other["statistics"] |= {name: int(v) for name, v in other["statistics"].items() if float(v).is_integer()}
    path.write_text("\ufeff" + json.dumps(other), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dict(UnitLabels.load(path)) == {f"{SITE}/3": UnitLabel("years")}
    # A unit's number that changed was once a label of another unit, silently.
    path.write_text(json.dumps({**other, "unit": f"{SITE}/4"}), encoding="utf-8")
    refuses(ValueError, r'line 1 of .*hash of other values in it.*remove its "sha256"', UnitLabels.load, path)


def test_a_missing_line_of_an_export_and_an_emptied_file_are_noticed(found, tmp_path):
    path = found.with_labels({f"{SITE}/3": "years"}).export(tmp_path / "units.jsonl", units=[f"{SITE}/{i}" for i in (2, 3, 4)])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (lines[:2], lines[1:], [lines[0], lines[2]]):
        path.write_text("".join(kept), encoding="utf-8")
        refuses(ValueError, r"units\.jsonl holds 2 of the 3 lines that were written; line \d is the first", UnitLabels.load, path)
    path.write_text("".join(lines).replace('"years"', '"tears"'), encoding="utf-8")
    refuses(ValueError, "something was changed since it was written", UnitLabels.load, path)
    unsealed = [json.dumps({k: v for k, v in json.loads(line).items() if k != "sha256"}) for line in lines[:2]]
    path.write_text("\n".join(unsealed), encoding="utf-8")
    with pytest.warns(UnsealedFileWarning):
        assert list(UnitLabels.load(path)) == [f"{SITE}/3"]
    path.write_text("\n", encoding="utf-8")
    refuses(ValueError, r"units\.jsonl is not labels, or damaged \(it is empty\)", UnitLabels.load, path)
    path.write_bytes(b"\xff\xfe")
    refuses(ValueError, r"units\.jsonl is not labels, or damaged", UnitLabels.load, path)


def test_a_saved_file_is_covered_and_lines_may_be_added(found, tmp_path):
    labels = UnitLabels.of(found.identities, {f"{SITE}/{i}": f"label {i}" for i in range(3)})
    path = labels.save(tmp_path / "labels.jsonl")
    whole = path.read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_text(whole + f'\n{{"unit": "{SITE}/7", "label": "by hand"}}', encoding="utf-8")
        assert UnitLabels.load(path)[f"{SITE}/7"].label == "by hand"
        path.write_text("".join(f'{{"unit": "{SITE}/{i}", "label": "by hand"}}\n' for i in range(2)), encoding="utf-8")
        assert len(UnitLabels.load(path)) == 2
    path.write_text(whole.replace("label 1", "label 9"), encoding="utf-8")
    refuses(ValueError, r"line 2 of .*hash of other", UnitLabels.load, path)


def test_odd_labels_are_seen(found):
    odd = "x\x1b[31m\x00\u202e"
    labels = UnitLabels.of(found.identities, {f"{SITE}/0": {"label": odd, "note": odd}})
    audited = found.with_labels(labels)
    for shown in (repr(labels), repr(audited.unit(f"{SITE}/0")), labels._repr_html_(), audited._repr_html_()):
        assert not [c for c in shown if not c.isprintable() and c != "\n"]


def test_labels_to_a_file_and_back(found, tmp_path):
    """JSON leaves U+2028, U+2029 and U+0085 as they are; str.splitlines would cut there."""
    text = "naïve “ü” a\u2028b\u2029c\x85d\x0be\r\nf"
    labels = UnitLabels.of(found.identities, {f"{SITE}/0": {"label": text, "note": text, "author": text}, f"{SITE}/1": "b"})
    loaded = UnitLabels.load(labels.save(tmp_path / "labels.jsonl"))
    assert not UnitLabels.load(UnitLabels({}).save(tmp_path / "none.jsonl"))
    assert dict(loaded) == dict(labels) and loaded.factors == labels.factors == {SITE: found.identities[SITE]}
    assert loaded[f"{SITE}/0"].note == text and "naïve" in repr(loaded) and list(loaded.table()["label"]) == [text, "b"]
    with_one_more = loaded | UnitLabels.of(found.identities, {f"{SITE}/1": "c"}, author="you")
    assert with_one_more[f"{SITE}/1"] == UnitLabel("c", "", "you") and len(with_one_more) == 2


def test_labels_of_other_factors_are_refused(found, other, tmp_path):
    path = UnitLabels.of(found.identities, {f"{SITE}/0": "years"}).save(tmp_path / "labels.jsonl")
    labels = UnitLabels.load(path)
    refuses(ValueError, r"the labels of blocks\.1\.mlp_out were made for other factors", other.with_labels, labels)
    with pytest.raises(ValueError, match="made for other factors"):
        audit(lettered(), other.factors, random_tokens(3, 8), labels=labels, progress=False)
    with pytest.raises(ValueError, match="two different sets of factors"):
        labels | UnitLabels.of(other.identities, {f"{SITE}/1": "names"})
    more = UnitLabels.of(other.identities, {f"{SITE}/1": "names"}).save(tmp_path / "more.jsonl")
    path.write_text(path.read_text(encoding="utf-8") + more.read_text(encoding="utf-8"), encoding="utf-8")
    refuses(ValueError, r"line 2 of .*of other factors than the lines before", UnitLabels.load, path)


def test_labels_of_no_unit_are_refused(found):
    refuses(ValueError, "has 12 units, counted from 0", found.with_labels, {f"{SITE}/12": "years"})
    refuses(ValueError, "no site is in both", found.with_labels, {"blocks.7.mlp_out/0": "years"})
    refuses(ValueError, "must be text, got 3", found.with_labels, {f"{SITE}/0": 3})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no label"),
        ("[" * 100_000, "is no label"),
        ('{"unit": ' + "9" * 5000, "is no label"),
        ('["blocks.1.mlp_out/0", "years"]', 'expected an object with "unit"'),
        ('{"unit": "c380", "label": "years"}', "is not a unit name"),
        ('{"unit": "blocks.1.mlp_out/0", "label": 7}', "must be text"),
        ('{"unit": "blocks.1.mlp_out/1", "label": "again"}', "a second time"),
    ],
)
def test_files_that_are_no_labels(line, said, tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"unit": "blocks.1.mlp_out/1", "label": "years"}\n\n' + line + "\n", encoding="utf-8")
    refuses(ValueError, f"line 3 of .*{said}", UnitLabels.load, path)

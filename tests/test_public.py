"""The public surface: what `import swd_lens` offers, and that it is loaded when first used."""

import subprocess
import sys

import pytest

import swd_lens as swd


def loaded_after(program: str) -> set[str]:
    """Modules of these that a fresh process has loaded at the end of a program."""
    heavy = ("torch", "transformer_lens", "matplotlib", "pandas", "transformers")
    end = f"\nimport sys\nprint(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program + end], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_name_is_where_the_table_says():
    for homes in (swd.PUBLIC, swd.ALIASES, swd.TYPES, swd.ERRORS):
        for name, home in homes.items():
            value = getattr(swd, name)
            if hasattr(value, "__module__") and hasattr(value, "__name__"):
                assert value.__module__ == f"swd_lens.{home}", (name, value.__module__)


def test_a_name_stands_in_one_table_and_namespaces_have_theirs():
    names = [name for homes in (swd.PUBLIC, swd.NAMESPACES, swd.ALIASES, swd.TYPES, swd.ERRORS) for name in homes]
    assert len(names) == len(set(names))
    assert len(swd.PUBLIC) <= 34 and set(dir(swd)) == {*swd.PUBLIC, *swd.NAMESPACES, "errors", "types"}
    assert swd.edit.edit_unit is swd.edit_unit and swd.qk.qk_screen is swd.qk_screen and swd.graph.unit_graph is swd.unit_graph
    assert swd.interactions.unit_overlap is swd.unit_overlap and swd.study.sweep is swd.sweep
    assert swd.errors.AttachError is swd.AttachError and swd.types.Circuit is not None
    assert set(dir(swd.errors)) == set(swd.ERRORS)
    with pytest.raises(AttributeError, match="has no attribute 'Attach'; it has "):
        _ = swd.errors.Attach
    with pytest.raises(AttributeError, match="module 'swd_lens' has no attribute 'factorise'"):
        _ = swd.factorise


@pytest.mark.slow
def test_a_function_is_not_hidden_by_a_package():
    program = "import swd_lens\nimport swd_lens.train.finetune.mount\nimport swd_lens.factorization.factorize\n"
    assert "torch" in loaded_after(program + "assert callable(swd_lens.finetune) and callable(swd_lens.factorize)")


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import swd_lens; swd_lens.__version__; dir(swd_lens)") == set()


def test_the_solver_needs_torch_alone():
    assert loaded_after("import swd_lens.solver") == {"torch"}

"""What `make venv` builds can be imported as it is, and what cannot be imported says why."""

from __future__ import annotations

import pytest

from perfguard.exceptions import why_not_imported
from tests import zoo
from tests.warm import run_fresh


@pytest.mark.slow
@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
def test_vision_and_training_libraries_import() -> None:
    """A CPU torch beside PyPI's torchvision once brought all four down, and the tests hid it."""
    code = "import torchvision, timm, lightning, transformers; from transformers import Trainer; print(Trainer)"
    assert "Trainer" in run_fresh("-c", code)


def caught(code: str) -> ImportError:
    with pytest.raises(ImportError) as caught:
        exec(code)
    return caught.value


def test_only_a_package_that_is_not_there_is_missing() -> None:
    missing = "pip install it"
    assert why_not_imported(caught("import no_such_package.part"), "no_such_package", missing) == missing
    assert why_not_imported(caught("from json import no_such_name"), "json", missing) == (
        f"json is installed, but importing it failed with ImportError: {caught('from json import no_such_name')}"
    )
    # a package that is there, and imports one that is not
    assert why_not_imported(caught("import no_such_package"), "json", missing).endswith("No module named 'no_such_package'")


def test_first_cause_is_named_through_wrapping() -> None:
    """Transformers imports lazily, and wraps what went wrong in an error that says nothing."""
    error = ModuleNotFoundError("Could not import module 'Trainer'.")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert why_not_imported(error, "transformers", "pip install it").endswith(
        "failed with RuntimeError: operator torchvision::nms does not exist"
    )

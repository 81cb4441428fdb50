"""What `make venv` builds can be imported as it is, and what cannot be imported says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perfguard.exceptions import why_not_imported
from tests import zoo


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


def fails_in(package: str, error: str) -> str:
    """Code after which importing ``package``, and what is in it, raises ``error``."""
    return f"""
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise {error}

sys.meta_path.insert(0, Broken())
"""


@pytest.mark.slow
@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
def test_vision_and_training_libraries_import() -> None:
    """A CPU torch beside PyPI's torchvision once brought all four down, and the tests hid it."""
    done = run_python("import torchvision, timm, lightning, transformers; from transformers import Trainer; print(Trainer)")
    assert done.returncode == 0, done.stderr
    assert "Trainer" in done.stdout


@pytest.mark.parametrize("integration", ["transformers", "lightning"])
def test_broken_host_names_the_real_cause(integration: str) -> None:
    """It once said that Transformers was missing where torchvision was broken."""
    torchvision_fails = fails_in("torchvision", 'RuntimeError("operator torchvision::nms does not exist")')
    done = run_python(f"{torchvision_fails}\nimport perfguard_optuna.{integration}")
    assert done.returncode == 1
    assert "operator torchvision::nms does not exist" in done.stderr.strip().splitlines()[-1]
    assert "pip install" not in done.stderr


@pytest.mark.parametrize("integration", ["transformers", "lightning"])
def test_missing_host_names_the_pip_line(integration: str) -> None:
    absent = fails_in(integration, "ModuleNotFoundError(f'No module named {name!r}', name=name)")
    done = run_python(f"{absent}\nimport sys; sys.modules['pytorch_lightning'] = None\nimport perfguard_optuna.{integration}")
    assert done.returncode == 1
    assert f"pip install 'perfguard[{integration}]'" in done.stderr.strip().splitlines()[-1]


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

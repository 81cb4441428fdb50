"""PyG is imported without its data sets, and whoever uses them has them."""

from __future__ import annotations

import json
import subprocess
import sys

DRAGGED = ["transformers", "pandas", "torch_geometric.datasets"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_network_imports_no_data_sets() -> None:
    found = run(
        "import json, sys, perfguard_models.graph_network\n"
        f"print(json.dumps([name for name in {DRAGGED} if name in sys.modules]))"
    )
    assert json.loads(found) == []


def test_what_was_left_out_is_imported_when_it_is_used() -> None:
    found = run(
        "import perfguard_models.graph_network, torch, torch_geometric\n"
        "print(torch_geometric.datasets.FakeDataset.__name__, torch._dynamo.OptimizedModule.__name__)\n"
        "import torch_geometric.datasets\n"
        "from torch_geometric.datasets import FakeDataset\n"
        "assert FakeDataset is torch_geometric.datasets.FakeDataset\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item() == 2.0\n"
        "print(torch_geometric.is_torch_instance(torch.nn.Linear(1, 1), torch.nn.Linear))"
    )
    assert found.split() == ["FakeDataset", "OptimizedModule", "True"]


def test_a_package_that_was_imported_before_stays_whole() -> None:
    found = run(
        "import torch_geometric\n"
        "whole = torch_geometric.datasets\n"
        "import perfguard_models.graph_network\n"
        "print(torch_geometric.datasets is whole)"
    )
    assert found.split() == ["True"]


def test_who_looks_at_all_modules_imports_nothing() -> None:
    """`inspect.getmodule` has imported the data sets in the middle of the import of PyG, which ended with an ImportError."""
    found = run(
        "import inspect, sys\n"
        "from perfguard_models.light_pyg import importing_lazily\n"
        "with importing_lazily('xml.sax', 'wsgiref'):\n"
        "    import xml.sax\n"
        "    hasattr(sys.modules['xml.sax'], '__file__')\n"
        "    inspect.getmodule(inspect.currentframe(), '<unknown>')\n"
        "    print('xml.sax.handler' in sys.modules)\n"
        "    import xml.sax.handler\n"
        "    print(sys.modules['xml.sax'].__file__ is not None)"
    )
    assert found.split() == ["False", "True"]


def test_network_is_imported_before_pytorch() -> None:
    assert run("import perfguard_models.light_pyg, torch\nprint(torch.__name__)").split() == ["torch"]

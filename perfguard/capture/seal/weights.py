"""Files of weights that a dry run saves. They have the names, the shapes and the types, and can be loaded again.

A tensor of the device has no data, so none of it is written. What is large is left out of the file, which has a hole there.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def save_weights_small(*, most_bytes: int = 2**26) -> None:
    """Let `torch.save` and safetensors leave out the data of what has more than ``most_bytes``."""
    import safetensors.torch
    import torch
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    torch.save = _saving(torch.save, most_bytes)
    functions: Any = safetensors.torch  # `save_file` and all that has imported it call the two by these names
    functions.serialize_file = _serializing(functions.serialize, most_bytes)
    # Workers of loaders that run already work for the process before.
    _MultiProcessingDataLoaderIter._shutdown_workers = lambda *_: None  # type: ignore[method-assign]


def _saving(own: Callable[..., None], most_bytes: int) -> Callable[..., None]:
    import torch
    from torch.serialization import skip_data
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_leaves

    @functools.wraps(own)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
            is_large = sum(tensor.nbytes for tensor in tensors) > most_bytes
            with skip_data() if is_large else nullcontext():
                if not isinstance(f, str | os.PathLike):
                    own(obj, f, *args, **kwargs)
                    return
                with open(f, "wb") as file:  # PyTorch would open it by itself, where Python's functions are not asked
                    own(obj, file, *args, **kwargs)

    return save


def _serializing(serialize: Callable[..., bytes], most_bytes: int) -> Callable[..., None]:
    def serialize_file(tensors: Mapping[str, Any], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        sizes = {name: _num_bytes(tensor) for name, tensor in tensors.items()}
        if sum(sizes.values()) <= most_bytes:
            Path(filename).write_bytes(serialize(tensors, metadata))
            return
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            begin = end
            end = begin + sizes[name]
            header[name] = {
                "dtype": _field(tensor, "dtype"),
                "shape": list(_field(tensor, "shape")),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(filename, "wb") as file:  # https://github.com/huggingface/safetensors#format
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    return serialize_file


def _field(tensor: Any, name: str) -> Any:
    """What is to be written of a tensor is an object since safetensors 0.8, and was a dict."""
    return tensor[name] if isinstance(tensor, Mapping) else getattr(tensor, name)


def _num_bytes(tensor: Any) -> int:
    return len(tensor["data"]) if isinstance(tensor, Mapping) else int(tensor.data_len)

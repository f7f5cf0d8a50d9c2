"""A device that isn't there: the arithmetic is the CPU's, and what makes the host wait is counted.

Its tensors say that they are on "meta", so that code which asks takes the way of devices. torch
hands their operations to the mode, which runs them on the data behind.
"""

from collections import Counter
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")

_aten = torch.ops.aten
# What is asked of these is a value, or a shape, that only the device knows.
_READS = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten.equal,
    _aten._unique2,
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_MASKS = {torch.bool, torch.uint8}


class _FakeTensor(torch.Tensor):
    """A tensor of the fake device; `behind` has its numbers."""

    behind: torch.Tensor

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> Self:
        fake = torch.Tensor._make_wrapper_subclass(
            cls, behind.shape, strides=behind.stride(), dtype=behind.dtype, device=DEVICE
        )
        fake.behind = behind
        return fake

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:
        raise AssertionError(f"{operation} outside of the tensor's FakeDevice")


class FakeDevice(TorchDispatchMode):
    """Runs what is done to its tensors inside a `with`; `waits` counts what the host waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._lists = _Lists(self.waits)

    def __enter__(self) -> Self:
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def place(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` as a tensor of the device; that is the test's doing, and isn't counted."""
        return _FakeTensor(data)

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        is_ours = any(isinstance(leaf, _FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not is_ours and target != DEVICE:
            return operation(*args, **kwargs)
        comes_back = is_ours and target is not None and target != DEVICE
        self._count(operation.overloadpacket, args, kwargs, comes_back=comes_back)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        result = operation(*tree_map(_behind, args), **tree_map(_behind, kwargs))
        return result if comes_back else tree_map(_on_device, result)

    def _count(self, operation: Any, args: Any, kwargs: Any, *, comes_back: bool) -> None:
        has_mask = operation in _INDEXING and any(
            index is not None and index.dtype in _MASKS for index in args[1]
        )
        goes_there = operation is _aten._to_copy and not isinstance(args[0], _FakeTensor)
        if comes_back:
            self.waits["copy to the host"] += 1
        elif goes_there and not kwargs.get("non_blocking"):
            self.waits["copy to the device"] += 1
        elif operation in _READS or has_mask:
            self.waits[str(operation)] += 1


class _Lists(TorchFunctionMode):
    """Stands in where torch has no operation for the mode: from lists of numbers, and to them."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.tolist and isinstance(args[0], _FakeTensor):
            self._waits["copy to the host"] += 1
            return args[0].behind.tolist()
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            self._waits["copy to the device"] += 1
            return _FakeTensor(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        return function(*args, **kwargs)


def _behind(leaf: Any) -> Any:
    return leaf.behind if isinstance(leaf, _FakeTensor) else leaf


def _on_device(leaf: Any) -> Any:
    return _FakeTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

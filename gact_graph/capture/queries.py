"""What is asked of a tensor beside its values: its shape, its device, whether it needs a gradient.

A function mode sees these, too, and in a layer there are ten of them for each operation. They save
nothing and make nothing that could be saved, so nobody need follow them.
"""

from __future__ import annotations

from types import GetSetDescriptorType

import torch
from torch import Tensor

_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"),
    *("is_inference", "element_size", "data_ptr", "get_device", "untyped_storage"),
)

QUERIES = frozenset(
    [
        *(
            attribute.__get__
            for part in Tensor.__mro__
            for attribute in vars(part).values()
            if isinstance(attribute, (GetSetDescriptorType, property))
        ),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _METHODS if hasattr(torch, name)),
    ]
)
"""The functions as a function mode gets them: methods, and getters of attributes. A view that is
read as an attribute, such as ``x.T``, is among them, since autograd saves nothing for it."""

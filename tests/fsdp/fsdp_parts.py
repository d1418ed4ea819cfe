"""Puts together what the ranks hold."""

from __future__ import annotations

import torch


def assembled(ranks):
    """name -> (tensor put together from every rank's boxes, how many boxes cover each element). Elements covered more than once must be
    equal in every box."""
    whole = {}
    for held in ranks:
        for name, shape, start, tensor, _ in held:
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=tensor.dtype), torch.zeros(shape, dtype=torch.int32)
            value, count = whole[name]
            assert (value.shape, value.dtype) == (torch.Size(shape), tensor.dtype), f"ranks disagree about {name}"
            box = tuple(slice(at, at + n) for at, n in zip(start, tensor.shape, strict=True))
            seen = count[box] > 0
            assert torch.equal(value[box][seen], tensor[seen]), f"replicas of {name} differ"
            value[box] = tensor
            count[box] += 1
    return whole

"""What a receiver may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.errors import ConfigError
from mx_common.refit.pieces import Piece, Pieces


def pieces() -> Pieces:
    return Pieces.of(
        [
            Piece("a", (1, 0), (2, 3), 4096, (6, 2), 2),
            Piece("b", (), (), 8192, (), 4, device=1),
            Piece("a", (0, 0), (1, 3), 9000, (6, 2), 2),
        ],
        mem="VRAM",
    )


def test_pieces_of_fewer_dims_are_padded_on_the_right() -> None:
    made = pieces()
    assert made.names == ("a", "b")
    assert made.tensor.tolist() == [0, 1, 0]
    assert made.start.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert made.size.tolist() == [[2, 3], [1, 1], [1, 3]]
    assert made.nbytes.tolist() == [12, 4, 6]
    assert (made.device.tolist(), made.mem, len(made)) == ([0, 1, 0], "VRAM", 3)


def test_a_part_of_the_pieces_keeps_names_and_memory() -> None:
    part = pieces().taken(np.array([False, True, True]))
    assert (part.names, part.tensor.tolist(), part.addr.tolist(), part.mem) == (("a", "b"), [1, 0], [8192, 9000], "VRAM")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": [0, 2, 0]}, "outside its 2 names"),
        ({"tensor": [0, -1, 0]}, "outside its 2 names"),
        ({"names": ("a", "a")}, "twice"),
        ({"addr": [4096, 0, 9000]}, r"piece 1 of b goes to address 0"),
        ({"addr": [4096, -5, 9000]}, "negative value -5"),
        ({"addr": [4096, 8192]}, "different lengths"),
        ({"start": [[-1, 0], [0, 0], [0, 0]]}, "piece 0 of a has a negative side"),
        ({"size": [[2], [1], [1]]}, "different ranks"),
        ({"itemsize": [2, 0, 2]}, "no bytes"),
        ({"itemsize": [2.0, 4.0, 2.0]}, "whole numbers"),
        ({"stride": [[6, 0], [0, 0], [6, 2]]}, "share addresses"),
        ({"stride": [[4, 2], [0, 0], [6, 2]]}, "share addresses"),
        ({"stride": [[-6, 2], [0, 0], [6, 2]]}, "share addresses"),
        ({"mem": "DISK"}, "DRAM, VRAM"),
    ],
)
def test_columns_that_cannot_be_a_destination_are_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(pieces(), **change)


def test_a_piece_whose_start_size_and_stride_differ_in_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="a: start"):
        Pieces.of([Piece("a", (0,), (1, 2), 4096, (2, 2), 2)])


def test_columns_cannot_be_changed_through_the_arrays_they_came_from() -> None:
    addr = np.array([4096, 8192, 9000], dtype=np.uint64)
    made = replace(pieces(), addr=addr)
    addr[0] = 1
    assert made.addr[0] == 4096
    with pytest.raises(ValueError, match="read-only"):
        made.addr[0] = 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_view_of_dense_memory_is_accepted(shape: list[int], data: st.DataObject) -> None:
    whole = np.zeros(shape, dtype=np.uint16)
    view = whole.transpose(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(data.draw(st.integers(0, n - 1)), None) for n in view.shape)]
    made = Pieces.of([Piece("a", (0,) * view.ndim, view.shape, 4096, view.strides, 2)])
    assert made.stride.tolist() == [list(view.strides)]

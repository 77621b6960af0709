"""Kernels are launched with as many stages as fit into shared memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.errors import OutOfResources

from outrider.backends.triton import stages


class Kernel:
    """fits: most stages.  tried: numbers of stages of its launches."""

    def __init__(self, fits: int) -> None:
        self.fits, self.tried = fits, list[int]()

    def __call__(self, *given: Any, num_stages: int, **named: Any) -> None:
        assert given == (7,) and named == {"ROWS": 16}
        self.tried.append(num_stages)
        if num_stages > self.fits:
            raise OutOfResources(200, 100, "shared memory")


def test_fewer_stages_are_tried_and_what_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_FITTING", {})
    kernel, other = Kernel(2), Kernel(4)
    stages.launch(kernel, "wide", 4, 7, ROWS=16)
    assert kernel.tried == [4, 3, 2]
    stages.launch(kernel, "wide", 4, 7, ROWS=16)
    assert kernel.tried == [4, 3, 2, 2]
    stages.launch(other, "narrow", 4, 7, ROWS=16)
    assert other.tried == [4]


def test_a_kernel_that_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_FITTING", {})
    kernel = Kernel(0)
    with pytest.raises(OutOfResources):
        stages.launch(kernel, "wide", 2, 7, ROWS=16)
    assert kernel.tried == [2, 1]

"""Devices of the tests in this folder: the CPU in every run, and a GPU where there is one."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param

"""Parsing of options, and requests that are refused before anything starts."""

import pytest

from bridge_profiling.bench import requests
from bridge_profiling.errors import ProfilingConfigError

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB:64KiB:4x", (KIB, 4 * KIB, 16 * KIB, 64 * KIB)),
        ("1KiB:100KiB:10", (KIB, 10 * KIB, 100 * KIB)),
        ("512:2KiB", (512, KIB, 2 * KIB)),
        ("1MiB,1KB,8", (8, 1000, MIB)),
        ("1.5MiB", (3 * MIB // 2,)),
    ],
)
def test_sizes(text, sizes):
    assert requests.sizes_from(text) == sizes


@pytest.mark.parametrize("text", ["", "big", "1KiB:", "4KiB:1KiB:2x", "1KiB:4KiB:1x", "1KiB:4KiB:2x:3", "0", "100GiB", "-1"])
def test_an_invalid_size_is_refused_with_an_example(text):
    with pytest.raises(ProfilingConfigError, match="Type --sizes 1KiB:256MiB:4x"):
        requests.sizes_from(text)


def test_operations_are_typed_with_hyphens_and_all_are_the_default():
    assert requests.operations_from("all-reduce, send-recv,all_reduce") == ("all_reduce", "send_recv")
    assert requests.operations_from("") == requests.OPERATIONS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: requests.CollectivesRequest(("all_red",), (1,)), "unknown operation 'all-red'. Type all-reduce"),
        (lambda: requests.CollectivesRequest(("send",), (1,), dtype="int3"), "unknown dtype 'int3'"),
        (lambda: requests.CollectivesRequest(("send",), (1,), processes=1), "--nproc 1 is too small"),
        (lambda: requests.CopiesRequest((1,), seconds=0), "--seconds 0"),
        (lambda: requests.DataLoaderRequest("train"), "does not name a factory.*--loader module:factory"),
        (lambda: requests.DataLoaderRequest("train:make", workers=(-1,)), "--workers -1"),
        (lambda: requests.StepRequest("train:make", iterations=0), "--iterations 0"),
        (lambda: requests.integers_from("0,two", "--workers"), "--workers '0,two' is not a list"),
    ],
)
def test_what_cannot_be_measured_is_refused(make, said):
    with pytest.raises(ProfilingConfigError, match=said):
        make()

"""The throughput of a data loader on its own, with real loaders and workers."""

import gc
import multiprocessing
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from bridge_profiling.bench import data_loader
from bridge_profiling.bench.results import MeasurementError
from bridge_profiling.common.errors import ProfilingConfigError


class Samples(Dataset):
    """64 samples, made by a function of their index."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.sample(index)


def two_milliseconds(index):
    time.sleep(0.002)
    return {"x": torch.full((3,), float(index)), "y": index}


def fails(index):
    raise OSError("disk on fire")


def fails_in_workers(index):
    """As with too little shared memory."""
    if get_worker_info() is not None:
        raise OSError("no shared memory")
    return float(index)


def only_x(samples):
    return torch.stack([sample["x"] for sample in samples])


@pytest.fixture
def measure(monkeypatch):
    """Measures what a factory returns."""

    def measure(factory, **settings):
        monkeypatch.setattr(f"{__name__}.factory", factory, raising=False)
        settings = {"workers": (0,), "pin_memory": (False,), "prefetch": (2,), "batch_size": 1, "seconds": 0.1} | settings
        return data_loader.measure(loader=f"{__name__}:factory", **settings)

    return measure


def test_a_dataset_is_batched_and_its_rate_is_plausible(measure):
    (row,) = measure(lambda: Samples(two_milliseconds), batch_size=4)["rows"]
    assert (row["status"], row["samples_per_batch"], row["prefetch"]) == ("measured", 4, None)
    # Four samples of 2 ms each: at most 125 batches per second on any machine.
    assert 0 < row["batches_per_s"]["mean"] <= 125
    assert row["samples_per_s"]["mean"] == pytest.approx(4 * row["batches_per_s"]["mean"], rel=1e-4)
    assert row["batches"] >= 2


@pytest.mark.integration
def test_a_loader_keeps_its_batches_and_gets_the_settings_of_the_grid(measure):
    grid = {"workers": (0, 2), "pin_memory": (False, True), "prefetch": (2, 3)}
    result = measure(lambda: DataLoader(Samples(two_milliseconds), batch_size=4, shuffle=True, collate_fn=only_x), **grid)
    cells = [(row["workers"], row["pin_memory"], row["prefetch"]) for row in result["rows"]]
    assert cells == [(0, False, None), (0, True, None), *((2, pin, ahead) for pin in (False, True) for ahead in (2, 3))]
    assert {row["samples_per_batch"] for row in result["rows"] if row["status"] == "measured"} == {4}
    if not torch.cuda.is_available():
        assert all("CUDA device" in row["status"] for row in result["rows"] if row["pin_memory"])
    assert tuple(result["recommendation"][name] for name in ("workers", "pin_memory", "prefetch")) in cells


@pytest.mark.integration
def test_results_of_fewer_workers_are_kept_when_more_workers_fail(measure, monkeypatch):
    # How long torch waits for a worker that has failed before it ends it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    result = measure(lambda: Samples(fails_in_workers), workers=(0, 1))
    assert [row["status"].partition(" (")[0] for row in result["rows"]] == ["measured", "failed: OSError: no shared memory"]
    assert result["rows"][1]["batches_per_s"] is None
    assert result["recommendation"]["workers"] == 0
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(60)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("factory", "error", "said"),
    [
        (lambda: Samples(fails), MeasurementError, r"num_workers=0.*OSError: disk on fire \(.*test_data_loader.py:\d+\)$"),
        (lambda: DataLoader([]), MeasurementError, "the loader returns no batch"),
        (lambda: iter([torch.zeros(2)]), ProfilingConfigError, "which is not a DataLoader or a dataset"),
        (lambda path: path, MeasurementError, "missing 1 required positional argument: 'path'"),
    ],
)
def test_an_error_says_what_failed_and_where(measure, factory, error, said):
    with pytest.raises(error, match=said):
        measure(factory)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:nothing", "has no function nothing"),
        ("nowhere_to_be_found:make", "module nowhere_to_be_found not found"),
        ("fails_when_imported:make", "importing fails_when_imported fails: .*surely_no_such_module"),
    ],
)
def test_a_factory_that_cannot_be_imported_is_named(tmp_path, monkeypatch, name, said):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_when_imported.py").write_text("import surely_no_such_module\n")
    with pytest.raises(ProfilingConfigError, match=said):
        data_loader.measure(loader=name, workers=(0,), pin_memory=(False,), prefetch=(2,), batch_size=1, seconds=0.1)


def row(workers, rate, *, pin=False, prefetch=2, status="measured"):
    settings = {"workers": workers, "pin_memory": pin, "prefetch": prefetch if workers else None}
    return settings | {"status": status, "batches_per_s": {"mean": rate}}


def test_the_cheapest_of_the_fastest_settings_is_recommended_with_reasons():
    found = data_loader.recommendation([row(0, 10.0), row(2, 39.0), row(4, 40.0), row(4, 40.5, pin=True), row(8, 20.0)])
    assert (found["workers"], found["pin_memory"], found["prefetch"]) == (2, False, 2)
    for reason in ("39 batches/s", "gives 40.5: less than 5% more", "num_workers=0, pin_memory=False gives 10"):
        assert reason in found["reason"]
    assert data_loader.recommendation([row(0, 1.0, status="unavailable: why")]) is None

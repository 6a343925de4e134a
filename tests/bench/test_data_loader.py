"""The throughput of a data loader on its own, with real loaders and workers."""

from __future__ import annotations

import time
from collections import UserDict

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from bridge_profiling.bench import data_loader, step
from bridge_profiling.bench.requests import DataLoaderRequest
from bridge_profiling.bench.results import MeasurementError
from bridge_profiling.errors import ProfilingConfigError


class Squares(Dataset):
    """64 samples, each of which takes two milliseconds."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": torch.full((3,), float(index)), "y": index}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(32.0))


class Greedy(Squares):
    """Fails only in workers, as with too little shared memory."""

    def __getitem__(self, index):
        if get_worker_info() is not None:
            raise OSError("no shared memory")
        return float(index)


class Stubborn(Squares):
    """Retries after any exception, as datasets on a network do."""

    def __getitem__(self, index):
        while True:
            try:
                time.sleep(30)
            except Exception:
                continue


class Broken(Squares):
    def __getitem__(self, index):
        raise OSError("disk on fire")


made: list[dict] = []


def dataset():
    return Squares()


def loader():
    return DataLoader(Squares(), batch_size=4, shuffle=True, collate_fn=_first)


def stream():
    return DataLoader(Stream(), batch_size=8)


def chosen(num_workers, pin_memory, prefetch_factor, batch_size=2):
    made.append({"num_workers": num_workers, "prefetch_factor": prefetch_factor})
    return DataLoader(Squares(), batch_size=batch_size, num_workers=num_workers, prefetch_factor=prefetch_factor)


def batches():
    return [torch.zeros(5, 2)] * 3


def once():
    return iter([torch.zeros(2)])


def broken():
    return Broken()


def greedy():
    return Greedy()


def stubborn():
    return Stubborn()


def kept():
    return DataLoader(Squares(), num_workers=1, persistent_workers=True)


def nothing_at_all():
    return None


def leaves():
    raise SystemExit("usage: train.py --data PATH")


def needy(path):
    return path


def _first(samples):
    return torch.stack([sample["x"] for sample in samples])


def measure(name, **settings):
    chosen_settings = {"workers": (0,), "pin_memory": (False,), "seconds": 0.15} | settings
    return data_loader.measure(DataLoaderRequest(f"{__name__}:{name}", **chosen_settings))


def test_a_dataset_is_batched_and_its_rate_is_plausible():
    row = measure("dataset", batch_size=4)["rows"][0]
    assert (row["status"], row["samples_per_batch"], row["prefetch"]) == ("measured", 4, None)
    # Four samples of 2 ms each: at most 125 batches per second on any machine.
    assert 0 < row["batches_per_s"]["mean"] <= 125
    assert row["samples_per_s"]["mean"] == pytest.approx(4 * row["batches_per_s"]["mean"], rel=1e-4)
    assert row["batches"] >= 2


def test_a_loader_keeps_its_batches_and_gets_the_settings_of_the_grid():
    result = measure("loader", workers=(0, 2), pin_memory=(False, True), prefetch=(2, 3))
    cells = [(row["workers"], row["pin_memory"], row["prefetch"]) for row in result["rows"]]
    assert cells == [(0, False, None), (0, True, None), *((2, pin, ahead) for pin in (False, True) for ahead in (2, 3))]
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    assert {row["samples_per_batch"] for row in measured} == {4}
    if not torch.cuda.is_available():
        assert all("CUDA device" in row["status"] for row in result["rows"] if row["pin_memory"])
    chosen_cell = result["recommendation"]
    assert (chosen_cell["workers"], chosen_cell["pin_memory"], chosen_cell["prefetch"]) in cells
    assert "batches/s" in chosen_cell["reason"]


def test_a_stream_is_rebuilt_too():
    assert measure("stream", workers=(1,))["rows"][0]["samples_per_batch"] == 8


def test_a_factory_that_takes_the_settings_makes_each_loader_itself():
    made.clear()
    rows = measure("chosen", workers=(0, 1), prefetch=(4,))["rows"]
    assert made == [{"num_workers": 0, "prefetch_factor": None}, {"num_workers": 1, "prefetch_factor": 4}]
    assert {row["samples_per_batch"] for row in rows} == {2}


def test_a_list_of_batches_is_measured_as_a_dataset():
    result = measure("batches")
    # A list is a dataset whose samples are the batches.
    assert result["rows"][0]["status"] == "measured"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("broken", MeasurementError, "num_workers=0.*OSError: disk on fire.*test_data_loader.py"),
        ("once", MeasurementError, "no batch, or can be iterated over only once"),
        ("greedy", MeasurementError, r"OSError: no shared memory \(.*test_data_loader.py:\d+\)$"),
        ("leaves", MeasurementError, "SystemExit: usage: train.py"),
        ("nothing_at_all", ProfilingConfigError, "returns NoneType, which cannot be iterated over"),
        ("needy", ProfilingConfigError, "missing a required argument: 'path'"),
        ("nothing", ProfilingConfigError, "has no function nothing"),
    ],
)
def test_an_error_says_what_failed_and_where(name, error, said):
    with pytest.raises(error, match=said):
        measure(name, workers=(1,) if name == "greedy" else (0,))


def test_a_missing_module_and_a_failing_import_have_different_errors(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_when_imported.py").write_text("import surely_no_such_module\n")
    with pytest.raises(ProfilingConfigError, match="module nowhere_to_be_found not found"):
        step.load_factory("nowhere_to_be_found:make", "--loader")
    with pytest.raises(ProfilingConfigError, match=r"importing fails_when_imported fails: .*surely_no_such_module"):
        step.load_factory("fails_when_imported:make", "--loader")


def test_a_batch_that_never_arrives_ends_the_measurement_of_its_settings(monkeypatch):
    monkeypatch.setattr(data_loader, "_MIN_START_S", 0.2)
    monkeypatch.setattr(Squares, "__getitem__", lambda self, index: time.sleep(30))
    assert measure("dataset", seconds=0.05)["rows"][0]["status"].startswith("too slow")


def test_a_dataset_that_retries_forever_is_interrupted_too(monkeypatch):
    monkeypatch.setattr(data_loader, "_MIN_START_S", 0.2)
    assert measure("stubborn", seconds=0.05)["rows"][0]["status"].startswith("too slow")


def test_results_of_fewer_workers_are_kept_when_more_workers_fail():
    result = measure("greedy", workers=(0, 1))
    first, second = result["rows"]
    assert first["status"] == "measured"
    assert second["status"].startswith("failed: OSError: no shared memory (")
    assert second["batches_per_s"] is None
    assert result["recommendation"]["workers"] == 0


def test_persistent_workers_are_kept_in_all_settings_with_workers():
    cell = {"pin_memory": False, "prefetch_factor": None}
    assert data_loader._rebuilt(kept(), num_workers=2, **cell).persistent_workers
    assert not data_loader._rebuilt(kept(), num_workers=0, **cell).persistent_workers


def row(workers, rate, *, pin=False, prefetch=2):
    return {
        "workers": workers,
        "pin_memory": pin,
        "prefetch": prefetch if workers else None,
        "status": "measured",
        "batches_per_s": {"mean": rate},
    }


def test_the_cheapest_of_the_fastest_settings_is_recommended_with_reasons():
    found = data_loader.recommendation([row(0, 10.0), row(2, 39.0), row(4, 40.0), row(4, 40.5, pin=True), row(8, 20.0)])
    assert (found["workers"], found["pin_memory"], found["prefetch"]) == (2, False, 2)
    assert "39 batches/s" in found["reason"]
    assert "gives 40.5: less than 5% more" in found["reason"]
    assert "num_workers=0, pin_memory=False gives 10" in found["reason"]


def test_without_a_measured_row_nothing_is_recommended():
    assert data_loader.recommendation([row(0, 1.0) | {"status": "unavailable: why"}]) is None


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(7, 2), 7),
        ({"a": [1, 2], "b": torch.zeros(3)}, 2),
        (UserDict(input_ids=torch.zeros(6, 9)), 6),
        ((torch.zeros(5, 1), torch.zeros(4)), 5),
        (["x", "y", "z"], 3),
        (torch.tensor(1.0), None),
        (3, None),
    ],
)
def test_number_of_samples_in_a_batch(batch, count):
    assert data_loader.samples_in(batch) == count

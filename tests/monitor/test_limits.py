"""Alerts of readings beyond a limit, and the energy of iterations and tokens."""

import pytest

from bridge_profiling.monitor import LimitAlert, Limits, Readings, Sample
from bridge_profiling.monitor.gpus import EnergyMeter

GIB = 1 << 30
QUIET = {"utilization_ratio": 0.9, "memory_used_bytes": 40 * GIB, "memory_total_bytes": 80 * GIB, "temperature_celsius": 60}
QUIET |= {"temperature_limit_celsius": 90, "power_watts": 500, "power_limit_watts": 700}


def alerts(gpu: dict = {}, training: dict | None = None, *, seconds: int = 125, limits: Limits | None = None) -> list:  # noqa: B006
    """Those of constant readings, sampled once a second."""
    alert, found = LimitAlert(limits), []
    for second in range(seconds):
        gpus = (Readings({"gpu": "0"}, QUIET | gpu),)
        loop = None if training is None else Readings({}, training)
        found += alert.feed(Sample(1_700_000_000.0 + second, "node1", gpus=gpus, training=loop))
    return found


@pytest.mark.parametrize(
    ("kind", "gpu", "limits", "message"),
    [
        ("low_utilization", {"utilization_ratio": 0.3}, {"utilization_ratio": None}, "GPU 0 was busy for 30% of the last 60 s"),
        ("memory_headroom", {"memory_used_bytes": 79 * GIB}, {"memory_ratio": None}, "GPU 0 has 99% of its memory in use"),
        ("gpu_temperature", {"temperature_celsius": 88}, {"temperature_margin_celsius": None}, "GPU 0 is at 88 °C"),
        ("power_limit", {"power_watts": 695}, {"power_ratio": None}, "GPU 0 draws 99% of its power limit"),
    ],
)
def test_a_gpu_beyond_a_limit_for_a_whole_period_leads_to_an_alert_once_a_period(kind, gpu, limits, message):
    found = alerts(gpu)
    assert [alert.kind for alert in found] == [kind, kind]
    assert found[0].message.startswith(message)
    assert alerts(gpu, seconds=60) == []
    assert alerts(gpu, limits=Limits(**limits)) == []


@pytest.mark.parametrize(
    "gpu",
    [
        {},
        {"utilization_ratio": 0.5},
        {"memory_used_bytes": 77 * GIB},
        {"temperature_celsius": 87},
        # Nobody uses this one.
        {"utilization_ratio": 0.0, "memory_used_bytes": GIB // 2},
    ],
)
def test_a_gpu_within_its_limits_leads_to_none(gpu):
    assert alerts(gpu) == []


def test_a_training_that_waits_for_data_or_has_stalled_leads_to_an_alert():
    loading = alerts(training={"data_loading_ratio": 0.2})
    assert [alert.kind for alert in loading] == ["data_loading"] * 2
    assert loading[0].message.startswith("the training waits for data for 20% of an iteration")
    for since, median, stalled in ((299, 0.1, False), (301, 0.1, True), (301, 40.0, False), (401, 40.0, True)):
        found = alerts(training={"seconds_since_iteration": since, "iteration_median_seconds": median}, seconds=1)
        assert [alert.kind for alert in found] == ["no_iteration"] * stalled


def energy(*joules: float) -> tuple[Readings, ...]:
    return tuple(Readings({"gpu": str(gpu)}, {"energy_joules": each}) for gpu, each in enumerate(joules))


def test_energy_is_divided_by_the_iterations_and_tokens_of_the_same_time():
    meter = EnergyMeter()
    first = meter.read(energy(1000, 5000), {"iterations": 3, "tokens": 300})
    assert first["joules_per_iteration"] == "needs an iteration between two samples"
    found = meter.read(energy(1600, 5400), {"iterations": 5, "tokens": 500})
    assert found == {"joules_per_iteration": 500.0, "joules_per_token": 5.0}
    # A loaded driver counts from 0 again.
    again = meter.read(energy(10, 10), {"iterations": 6, "tokens": 600})
    assert again["joules_per_iteration"] == "needs an iteration between two samples"


def test_energy_that_a_gpu_does_not_count_is_unknown_and_a_part_of_a_gpu_counts_none():
    refused = Readings({"gpu": "1"}, {}, {"energy_joules": "the driver says: Not Supported"})
    assert EnergyMeter().read((*energy(1), refused), {"iterations": 1})["joules_per_token"] == "the driver says: Not Supported"
    assert EnergyMeter().read((), {"iterations": 1})["joules_per_iteration"] == "no GPU can be read"
    part, meter = Readings({"gpu": "0:1"}, {}, {"energy_joules": "the driver says: Not Supported"}), EnergyMeter()
    for iteration in (1, 2):
        found = meter.read((*energy(100 * iteration), part), {"iterations": iteration})
    assert found == {"joules_per_iteration": 100.0, "joules_per_token": "the loop does not report tokens"}

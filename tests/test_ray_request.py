"""NeMo RL's variables: what they mean, and one clear error for each that means nothing."""

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.settings.profiling import Window
from bridge_profiling.settings.ray import RayRequest

BOTH = {"NRL_NSYS_PROFILE_STEP_RANGE": "2:3", "NRL_NSYS_WORKER_PATTERNS": "*policy*,*vllm*"}


def asked(**variables):
    request = RayRequest.from_environment(BOTH | variables)
    assert request is not None
    return request


def test_the_convention_of_nemo_rl():
    request = asked()
    assert (request.window, request.profiler, request.extra_options) == (Window(2, 3), "nsys", {})
    assert [step for step in range(6) if step in request.window] == [2]
    names = ("dtensor_policy_worker", "vllm_generation_worker", "policy", "reward_worker", "POLICY")
    assert [name for name in names if request.selects(name)] == ["dtensor_policy_worker", "vllm_generation_worker", "policy"]


def test_neither_variable_asks_for_nothing():
    for environ in ({}, dict.fromkeys(BOTH, ""), {"NRL_NSYS_EXTRA_OPTIONS": '{"a": 1}', "BRIDGE_PROFILING_RAY_PROFILER": "x"}):
        assert RayRequest.from_environment(environ) is None


@pytest.mark.parametrize(("given", "missing"), [tuple(BOTH), tuple(reversed(BOTH))])
def test_one_without_the_other_says_which_is_missing_and_what_to_type(given, missing):
    with pytest.raises(ProfilingConfigError, match=rf"{given}.* is set, and {missing} is not.*Type {missing}=.*unset {given}"):
        RayRequest.from_environment({given: BOTH[given], missing: " "})


@pytest.mark.parametrize(("name", "value", "said"), [
    *(("NRL_NSYS_PROFILE_STEP_RANGE", steps, said) for steps, said in [
        ("0:3", "from 1.*NRL_NSYS_PROFILE_STEP_RANGE=11:13"), ("3:3", "window is empty.*=3:4"), ("5:3", "=3:5"),
        *((wrong, "is not a window") for wrong in ("2", "2-3", "a:b", "2:3:4", "-1:2", "2:", "1.5:3")),
    ]),
    ("NRL_NSYS_WORKER_PATTERNS", " , ,", "holds no pattern"),
    ("BRIDGE_PROFILING_RAY_PROFILER", "kineto", "nsys or torch"),
])  # fmt: skip
def test_values_that_mean_nothing_are_refused(name, value, said):
    with pytest.raises(ProfilingConfigError, match=said):
        asked(**{name: value})


@pytest.mark.parametrize(("written", "expected"), [
    ('{"gpu-metrics-device": "all", "t": "cuda,nvtx"}', {"gpu-metrics-device": "all", "t": "cuda,nvtx"}),
    ('{"--sample": "none", "cuda-memory-usage": true, "y": 5}', {"sample": "none", "cuda-memory-usage": "true", "y": "5"}),
    # NeMo RL puts quotes around its own name.
    ("""{"o": "'/runs/nsys/%p'"}""", {"o": "/runs/nsys/%p"}),
    # Placeholders of nsys are no braces of the shell.
    ('{"o": "/r/%h_%q{SLURM_JOB_ID}_%p"}', {"o": "/r/%h_%q{SLURM_JOB_ID}_%p"}),
])  # fmt: skip
def test_extra_options_keep_their_names_and_become_text(written, expected):
    assert asked(NRL_NSYS_EXTRA_OPTIONS=written).extra_options == expected


@pytest.mark.parametrize(("written", "said"), [
    ("{", "not a JSON object"), ('["t"]', "not a JSON object"), ("cpuctxsw=none", "not a JSON object"), ("null", "not a JSON"),
    ('{"t": ["cuda"]}', "value"), ('{"t": ""}', "value"), ('{"t": null}', "value"), ('{"d": 1.5}', "value"),
    ('{"": "x"}', "not an option"), ('{"a b": "x"}', "not an option's name"), ('{"cpuctxsw=none": ""}', "not an option's name"),
    ('{"o": "two words"}', "shell"), ('{"o": "$HOME/x"}', "shell"), ('{"o": "a;rm"}', "shell"), ('{"t": "a*"}', "shell"),
    ('{"o": "{a,b}"}', "shell"), ('{"o": "it\'s"}', "shell"),
])  # fmt: skip
def test_extra_options_that_nsys_cannot_be_given_are_refused(written, said):
    with pytest.raises(ProfilingConfigError, match=said) as raised:
        asked(NRL_NSYS_EXTRA_OPTIONS=written)
    assert "NRL_NSYS_EXTRA_OPTIONS" in str(raised.value)

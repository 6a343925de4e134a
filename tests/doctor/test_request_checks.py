"""What doctor says about the request itself: the window, the ranks, and what does not go together."""

from __future__ import annotations

import pytest

from bridge_profiling.doctor.checks import Machine
from bridge_profiling.doctor.profiling import check_profilers, check_ranks_exist, check_window_fits
from bridge_profiling.doctor.request import Request, apply_arguments, apply_file
from bridge_profiling.errors import ProfilingConfigError

TORCH = "profiling.use_pytorch_profiler=true"
NSYS = "profiling.use_nsys_profiler=true"


def only(verdicts):
    (verdict,) = verdicts
    return verdict


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["train.train_iters=12"], "ok", "iterations 10 to 11 of 0 to 11"),
        (["train.train_iters=11"], "fails", "last iteration is 10"),
        ([], "unknown", "train.train_iters is not known"),
        (["train.train_iters=50", "profiling.profile_step_end=10"], "fails", "the window is empty"),
        (["train.train_iters=50", "profiling.profile_step_start=-1"], "fails", "not an integer of at least 0"),
        (["train.train_iters=50", "train.start_iteration=12"], "fails", "after the window 10-12"),
        (["train.train_iters=50", "train.start_iteration=10"], "warning", "iteration 10 is the run's first"),
        (["train.train_iters=50", "profiling.profile_step_start=0"], "warning", "lazy initialization"),
    ],
)
def test_the_window_is_held_against_the_run(request_for, arguments, status, told):
    verdict = only(check_window_fits(request_for(TORCH, *arguments), Machine()))
    assert verdict.status == status
    assert told in verdict.found
    assert bool(verdict.instead) == (status != "ok")


@pytest.mark.parametrize(
    ("ranks", "world_size", "status", "told"),
    [
        ("[0,3]", 4, "ok", "0, 3 of 4"),
        ("[0,4]", 4, "fails", "names 4, but the job has 4 ranks"),
        ("[]", 4, "fails", "names no rank"),
        ("some", 4, "fails", "'some' is not known"),
        ("all", 4, "ok", "0, 1, 2, 3 of 4"),
        ("all", 512, "warning", "512 ranks write a trace each"),
        ("pp", 16, "ok", "0, 4, 8, 12 of 16"),
        ("pp", 6, "fails", "cannot be split"),
        ("[0]", None, "unknown", "the number of ranks is not known"),
    ],
)
def test_the_ranks_are_held_against_the_world(request_for, ranks, world_size, status, told):
    sizes = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=4"] if ranks == "pp" else []
    request = request_for(TORCH, f"profiling.profile_ranks={ranks}", *sizes, world_size=world_size)
    verdict = only(check_ranks_exist(request, Machine()))
    assert (verdict.status, told in verdict.found) == (status, True), verdict


@pytest.mark.parametrize(
    ("arguments", "fields", "status", "told"),
    [
        ([TORCH], {}, "ok", "the torch profiler"),
        ([NSYS, "profiling.record_memory_history=true"], {}, "ok", "nsys and memory history"),
        ([TORCH, NSYS], {}, "fails", "CUPTI"),
        ([TORCH], {"nsys_prefix": True}, "fails", "CUPTI"),
        ([NSYS], {"launcher": "ft"}, "fails", "Nsys not supported with the FaultTolerancePlugin"),
        ([NSYS, "ft.enable_ft_package=true"], {}, "fails", "ft.enable_ft_package is true"),
        ([TORCH], {"launcher": "ft"}, "ok", "the torch profiler"),
        ([], {}, "warning", "nothing will be captured"),
        ([], {"nsys_prefix": True}, "warning", "nothing marks the window"),
    ],
)
def test_what_does_not_go_together_is_named(request_for, arguments, fields, status, told):
    verdict = only(check_profilers(request_for(*arguments, **fields), Machine()))
    assert (verdict.status, told in verdict.found) == (status, True), verdict


def test_a_machine_alone_is_asked_nothing_about_a_run():
    for check in (check_window_fits, check_ranks_exist, check_profilers):
        assert list(check(Request(), Machine())) == []


def test_settings_come_from_yaml_and_overrides_of_any_container(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {num_layers: 4, some_other_field: 7, tensor_model_parallel_size: 2}\n"
        "train: {train_iters: 30}\nprofiling: {use_pytorch_profiler: true, profile_ranks: [0, 1]}\n"
        "ft: null\nmixed_precision: bf16\n"
    )
    request = Request()
    apply_file(request, file)
    apply_arguments(request, ["train.train_iters=40", "++profiling.profile_ranks=pp", "model.hidden_size=64", "optimizer.lr=1"])
    assert request.integer("train.train_iters") == 40
    assert request.integer("model.num_layers") == 4
    assert request.parallel_size("tensor_model") == 2
    assert request.profiling.use_pytorch_profiler
    assert request.profiling.profile_ranks == "pp"


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("profiling.use_nsys=true", "Type profiling.use_nsys_profiler"),
        ("profilng.use_nsys_profiler=true", "Type profiling.use_nsys_profiler"),
        ("train.train_iter=5", "Type train.train_iters"),
        ("train.train_iters=many", "Type for example train.train_iters=10"),
        ("--flag", "Type section.field=value"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_right_one(argument, instead):
    with pytest.raises(ProfilingConfigError) as refused:
        apply_arguments(Request(), [argument])
    assert instead in str(refused.value)


def test_a_file_with_a_wrong_setting_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("profiling: {profile_step_start: soon}\n")
    with pytest.raises(ProfilingConfigError, match=r"run\.yaml: profiling\.profile_step_start"):
        apply_file(Request(), file)


def test_of_a_scripts_command_line_only_settings_count():
    request = Request()
    arguments = ["--recipe", "x", "'profiling.profile_ranks=[0,1]'", "data=/a=b", "train.train_iters=9", "train.train_iter=8"]
    apply_arguments(request, arguments, strict=False)
    assert request.profiling.profile_ranks == [0, 1]
    assert request.integer("train.train_iters") == 9

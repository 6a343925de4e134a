"""What doctor says about the request itself: the window, the ranks, and what does not go together."""

from __future__ import annotations

import pytest

from bridge_profiling.doctor.checks import Machine
from bridge_profiling.doctor.profiling import check_profilers, check_ranks_exist, check_window_fits
from bridge_profiling.doctor.request import Request, apply_arguments, apply_file
from bridge_profiling.errors import ProfilingConfigError

TORCH = "profiling.use_pytorch_profiler=true"
NSYS = "profiling.use_nsys_profiler=true"
RANKS = "profiling.profile_ranks="
PP = (f"{RANKS}pp", "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=4")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
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
def test_the_window_is_held_against_the_run(request_for, arguments, status, said):
    (verdict,) = check_window_fits(request_for(TORCH, *arguments), Machine())
    assert (verdict.status, said in verdict.found, bool(verdict.instead)) == (status, True, status != "ok"), verdict


@pytest.mark.parametrize(
    ("check", "arguments", "fields", "status", "said"),
    [
        (check_ranks_exist, [f"{RANKS}[0,3]"], {"world_size": 4}, "ok", "0, 3 of 4"),
        (check_ranks_exist, [f"{RANKS}[0,4]"], {"world_size": 4}, "fails", "names 4, but the job has 4 ranks"),
        (check_ranks_exist, [f"{RANKS}[]"], {"world_size": 4}, "fails", "names no rank"),
        (check_ranks_exist, [f"{RANKS}some"], {"world_size": 4}, "fails", "'some' is not known"),
        (check_ranks_exist, [f"{RANKS}all"], {"world_size": 64}, "ok", "7 and 56 more of 64"),
        (check_ranks_exist, [f"{RANKS}all"], {"world_size": 65}, "warning", "65 ranks write a trace each"),
        (check_ranks_exist, PP, {"world_size": 16}, "ok", "0, 4, 8, 12 of 16"),
        (check_ranks_exist, PP, {"world_size": 6}, "fails", "cannot be split"),
        (check_ranks_exist, [f"{RANKS}[0]"], {}, "unknown", "the number of ranks is not known"),
        (check_profilers, [TORCH], {}, "ok", "the torch profiler"),
        (check_profilers, [NSYS, "profiling.record_memory_history=true"], {}, "ok", "nsys and memory history"),
        (check_profilers, [TORCH, NSYS], {}, "fails", "CUPTI"),
        (check_profilers, [TORCH], {"nsys_prefix": True}, "fails", "CUPTI"),
        (check_profilers, [NSYS], {"launcher": "ft"}, "fails", "Nsys not supported with the FaultTolerancePlugin"),
        (check_profilers, [NSYS, "ft.enable_ft_package=true"], {}, "fails", "ft.enable_ft_package is true"),
        (check_profilers, [TORCH], {"launcher": "ft"}, "ok", "the torch profiler"),
        (check_profilers, [], {}, "warning", "nothing will be captured"),
        (check_profilers, [], {"nsys_prefix": True}, "warning", "nothing marks the window"),
    ],
)
def test_ranks_are_held_against_the_world_and_profilers_against_each_other(request_for, check, arguments, fields, status, said):
    (verdict,) = check(request_for(*arguments, **fields), Machine())
    assert (verdict.status, said in verdict.found) == (status, True), verdict


def test_a_machine_alone_is_asked_nothing_about_a_run():
    assert [list(check(Request(), Machine())) for check in (check_window_fits, check_ranks_exist, check_profilers)] == [[]] * 3


def test_settings_come_from_yaml_and_overrides_of_any_container(tmp_path):
    file, request = tmp_path / "run.yaml", Request()
    file.write_text(
        "model: {num_layers: 4, some_other_field: 7, tensor_model_parallel_size: 2}\n"
        "train: {train_iters: 30}\nprofiling: {use_pytorch_profiler: true, profile_ranks: [0, 1]}\n"
        "ft: null\nmixed_precision: bf16\n"
    )
    apply_file(request, file)
    apply_arguments(request, ["train.train_iters=40", "++profiling.profile_ranks=pp", "model.hidden_size=64", "optimizer.lr=1"])
    assert request.settings == {"train.train_iters": 40, "model.num_layers": 4, "model.tensor_model_parallel_size": 2}
    assert (request.integer("model.num_layers"), request.parallel_size("tensor_model")) == (4, 2)
    assert (request.profiling.use_pytorch_profiler, request.profiling.profile_ranks) == (True, "pp")
    file.write_text("profiling: {profile_step_start: soon}\n")
    with pytest.raises(ProfilingConfigError, match=r"run\.yaml: profiling\.profile_step_start"):
        apply_file(request, file)


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
    with pytest.raises(ProfilingConfigError, match=instead):
        apply_arguments(Request(), [argument])


def test_of_a_scripts_command_line_only_settings_count():
    request = Request()
    arguments = ["--recipe", "x", "'profiling.profile_ranks=[0,1]'", "data=/a=b", "train.train_iters=9", "train.train_iter=8"]
    apply_arguments(request, arguments, strict=False)
    assert (request.profiling.profile_ranks, request.settings) == ([0, 1], {"train.train_iters": 9})

"""What is known of a run before it is submitted: settings of files, overrides and command lines."""

import pytest

from bridge_profiling.doctor.request import Request, apply_arguments, apply_file
from bridge_profiling.errors import ProfilingConfigError


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

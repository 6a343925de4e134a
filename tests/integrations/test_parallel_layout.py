"""Where ranks stand, from meshes and wrapped models, against the mesh's own coordinates; process groups without peers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bridge_profiling.integrations.ddp_fsdp import repeat_annotations
from bridge_profiling.integrations.parallel_layout import describe, layout_of_mesh
from bridge_profiling.integrations.phases import PhaseWatch


@pytest.fixture
def connect():
    """torch.distributed as one of many ranks that are not there: groups are made, and nothing is sent."""

    def connect(world_size, rank=0):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(backend="fake", rank=rank, world_size=world_size, store=FakeStore())

    yield connect
    dist.destroy_process_group()


def mesh_of(shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def small():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


MESHES = {
    "data alone": ((8,), ("dp",)),
    "hybrid sharding": ((2, 4), ("dp_replicate", "dp_shard")),
    "tensor inside data": ((4, 2), ("dp", "tp")),
    "torchtitan's": ((2, 1, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    "all of them": ((2, 2, 2, 2, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    "data inside pipeline": ((2, 4), ("pp", "dp")),
    "tensor outermost": ((2, 4), ("tp", "dp")),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_ranks_coordinates_are_the_meshs(name, connect):
    shape, names = MESHES[name]
    world = torch.Size(shape).numel()
    connect(world)
    mesh = mesh_of(shape, names)
    found = layout_of_mesh(mesh)
    assert found.notes == []
    for rank in range(world):
        place = dict(zip(names, (mesh.mesh == rank).nonzero()[0].tolist(), strict=True))
        sizes = dict(zip(names, shape, strict=True))
        coordinates = found.layout.coordinates(rank)
        for dimension in ("tp", "cp", "pp"):
            assert coordinates[dimension] == (place.get(dimension, 0), sizes.get(dimension, 1))
        replicate, shard = place.get("dp_replicate", 0), place.get("dp_shard", place.get("dp", 0))
        sharded, replicas = sizes.get("dp_shard", sizes.get("dp", 1)), sizes.get("dp_replicate", 1)
        assert coordinates["dp"] == (replicate * sharded + shard, sharded * replicas)


@pytest.mark.parametrize(
    ("shape", "names", "note"),
    [
        ((2, 2), ("dp", "experts"), "'experts'"),
        ((2, 2, 2), ("dp_replicate", "tp", "dp_shard"), "not neighbours"),
    ],
)
def test_what_cannot_be_told_is_a_note_and_a_flat_layout(shape, names, note, connect):
    world = torch.Size(shape).numel()
    connect(world)
    found = layout_of_mesh(mesh_of(shape, names))
    assert note in found.notes[0]
    assert found.layout.dp == world
    assert found.mesh == dict(zip(names, shape, strict=True))


def test_a_mesh_of_other_ranks_gives_no_coordinates(connect):
    connect(4)
    found = layout_of_mesh(dist.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")))
    assert "in order" in found.notes[0]


def test_fully_shard_on_a_part_of_a_mesh_has_the_whole_ones_layout(connect):
    connect(8, rank=3)
    mesh = mesh_of((4, 2), ("dp", "tp"))
    model = small()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    found, facts = describe(fully_shard(model, mesh=mesh["dp"]))
    assert found.notes == []
    assert found.layout.coordinates(3)["tp"] == (1, 2)
    assert found.layout.coordinates(3)["dp"] == (1, 4)
    assert (found.mesh, facts["sharded_over"]) == ({"dp": 4, "tp": 2}, {"dp": 4})


def test_dimensions_of_fully_shard_are_data_parallel_whatever_they_are_called(connect):
    connect(4)
    found, facts = describe(fully_shard(small(), mesh=mesh_of((2, 2), ("outer", "inner"))))
    assert (found.notes, found.layout.dp) == ([], 4)
    assert facts["sharded_over"] == {"outer": 2, "inner": 2}


def test_what_fully_shard_was_told_is_in_the_facts(connect):
    connect(2)
    model = small()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy, reshard_after_forward=False)
    _, facts = describe(fully_shard(model, mp_policy=policy))
    assert facts["name"] == "fully_shard"
    assert facts["parameters"] == 4 * 8 + 8 + 8 * 4 + 4
    assert {unit["name"]: unit["parameters"] for unit in facts["units"]} == {"": 8 * 4 + 4, "0": 4 * 8 + 8}
    assert facts["mixed_precision"]["param_dtype"] == "torch.bfloat16"
    assert facts["mixed_precision"]["reduce_dtype"] == "torch.float32"
    assert facts["wrapped_units"] == 2


def test_the_wrapper_on_a_mesh_of_two_dimensions(connect):
    from torch.distributed.fsdp import ShardingStrategy

    connect(8)
    model = FullyShardedDataParallel(
        small(),
        device_mesh=mesh_of((2, 4), ("replicate", "shard")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=torch.device("cpu"),
    )
    found, facts = describe(model)
    assert (found.notes, found.layout.dp, found.mesh) == ([], 8, {"replicate": 2, "shard": 4})
    assert (facts["sharding_strategy"], facts["mixed_precision"]["param_dtype"]) == ("HYBRID_SHARD", "torch.bfloat16")
    assert facts["parameters"] == 4 * 8 + 8 + 8 * 4 + 4


def test_ddp_in_a_group_of_some_ranks_says_that_it_cannot_tell(connect):
    connect(4)
    model = DistributedDataParallel(small(), process_group=dist.new_group([0, 2]), static_graph=True)
    found, facts = describe(model)
    assert "among 2 of 4 ranks" in found.notes[0]
    assert (facts["name"], facts["static_graph"]) == ("ddp", True)


def test_ddp_on_a_dimension_of_a_mesh(connect):
    connect(4, rank=2)
    found, _ = describe(DistributedDataParallel(small(), device_mesh=mesh_of((2, 2), ("dp", "tp"))["dp"]))
    assert found.notes == []
    assert found.layout.coordinates(2) == {"tp": (0, 2), "cp": (0, 1), "dp": (1, 2), "pp": (0, 1), "ep": (0, 1)}


@pytest.mark.parametrize(("shape", "names"), [((4,), ("tp",)), ((4,), None), ((2, 2), ("dp", "tp"))])
def test_a_tensor_parallel_model_that_nothing_wraps_stands_where_its_parameters_do(shape, names, connect):
    connect(4, rank=3)
    mesh = mesh_of(shape, names)
    parallelize_module(model := small(), mesh["tp"] if len(shape) == 2 else mesh, {"0": ColwiseParallel()})
    found, facts = describe(model)
    assert (facts["name"], found.notes) == ("torch", [])
    assert found.layout.coordinates(3)["tp"] == (3 % shape[-1], shape[-1])


def test_a_plain_model_has_no_wrapper_to_tell_of():
    found, facts = describe(small())
    assert (found.layout.world_size, facts) == (1, {"name": "torch", "parameters": 4 * 8 + 8 + 8 * 4 + 4})


def test_annotations_of_fully_shard_are_repeated_for_a_profiler_that_does_not_see_them(connect):
    from contextlib import contextmanager

    connect(2)
    seen = []

    @contextmanager
    def range_of(name):
        seen.append(name)
        yield

    model = small()
    for module in (model[0], model[2]):
        fully_shard(module)
    fully_shard(model)
    watch = PhaseWatch(range_of)
    repeat_annotations(watch, range_of)
    model(torch.randn(2, 4)).sum().backward()
    watch.detach()
    model(torch.randn(2, 4))
    gathered = [name for name in seen if name.startswith("FSDP::all_gather (")]
    assert gathered == [f"FSDP::all_gather ({unit})" for unit in (0, 2, 2, 0)]
    assert [name for name in seen if name.startswith("FSDP::post_backward_reduce")] == [
        f"FSDP::post_backward_reduce ({unit})" for unit in (2, 0)
    ]

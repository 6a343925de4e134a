"""Two Ray workers of one group, profiled by NeMo RL's variables; see docs/how-to/ray.md."""

import ray
import torch

from bridge_profiling.frameworks.ray import WorkerProfiling, worker_runtime_env


@ray.remote(num_cpus=0.1)
class Policy:
    def __init__(self, rank):
        self.model = torch.nn.Linear(64, 64)
        self.profiling = WorkerProfiling("policy_worker", rank=rank, world_size=2)

    def train(self, step):
        with self.profiling.step(step), self.profiling.range("forward-backward"):
            self.model(torch.ones(8, 64)).sum().backward()

    def close(self):
        self.profiling.close()


if __name__ == "__main__":
    ray.init()
    workers = [Policy.options(runtime_env=worker_runtime_env("policy_worker", rank=r)).remote(r) for r in range(2)]
    for step in range(1, 5):
        ray.get([worker.train.remote(step) for worker in workers])
    ray.get([worker.close.remote() for worker in workers])

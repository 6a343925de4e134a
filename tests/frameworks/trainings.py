"""A small training on one CPU in each framework, of eight iterations with one batch each, and what is captured of it."""

import importlib
from pathlib import Path

import torch

from tests.frameworks.captured import Captured

WINDOW = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}


class Training:
    """A training that writes below a folder. `train` calls `on_step` with the number of each iteration, counted from 0."""

    #: Below `bridge_profiling.frameworks`.
    module: str
    #: What the integration watches on objects of the framework.
    watched = {"get_batch_samples", "compute_loss", "evaluate", "backward", "save_state"}

    #: The iteration in which a signal leaves iteration 3 alone captured.
    sigterm_in = 4

    def __init__(self, folder: Path) -> None:
        self.folder, self.losses, self.objects = folder, [], []
        self.captured = Captured(folder / "profiles", "iter-3-5")

    def made(self, name, *arguments, **settings):
        """The integration's own class, made with the window."""
        integration = getattr(importlib.import_module(f"bridge_profiling.frameworks.{self.module}"), name)
        return integration(*arguments, **WINDOW | {"output_dir": self.folder / "profiles"} | settings)

    def still_watched(self):
        """Functions that an integration has left on what it watched."""
        return {name for one in self.objects for name in vars(one).keys() & self.watched}

    def iterations(self):
        return self.captured.manifest()["durations_ns"]["iteration"]

    def ending(self):
        """Status, captured and interrupted iterations."""
        manifest = self.captured.manifest()
        return manifest["status"], (manifest["captured"] or {}).get("iterations"), manifest["interrupted"]


class Loop(Training):
    module = "ddp_fsdp"

    def __init__(self, folder):
        super().__init__(folder)
        self.prepare()

    def prepare(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(16, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def profiling(self, **settings):
        return self.made("Profiling", self.model, self.optimizer, **settings)

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def batches(self, count=8):
        return torch.utils.data.DataLoader(torch.randn(count, 16), batch_size=1)

    def train(self, on_step=lambda number: None, start=0, **settings):
        self.prepare()
        with self.profiling(**settings) as profiling:
            for number, batch in enumerate(profiling.steps(self.batches(8 - start), start=start), start):
                self.step(batch)
                on_step(number)


class Accelerate(Training):
    module = "accelerate"

    def prepare(self, *, accumulation=1, batches=8):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(torch.randn(4 * batches, 16), batch_size=4)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.objects = [self.accelerator]
        return self

    def profiling(self, **settings):
        return self.made("Profiling", self.accelerator, **settings)

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def train(self, on_step=lambda number: None, start=0, **settings):
        self.prepare()
        with self.profiling(first_iteration=start, **settings) as profiling:
            batches = self.accelerator.skip_first_batches(self.loader, start)
            for number, batch in enumerate(profiling.steps(batches), start):
                self.step(batch)
                on_step(number)


class HuggingFace(Training):
    module = "hugging_face"

    def trainer(self, on_step=lambda number: None, **asked):
        import transformers

        losses = self.losses

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(16, 1)

            def forward(self, x):
                if self.training:
                    on_step(trainer.state.global_step)
                loss = self.layer(x).square().mean()
                losses.append(loss.item())
                return {"loss": loss}

        quiet = {"max_steps": 8, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        quiet |= {"logging_strategy": "no", "save_strategy": "no", "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(self.folder / "checkpoints", **quiet | asked)
        data = [{"x": row} for row in torch.ones(64, 16).cumsum(0)]
        trainer = transformers.Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8])
        self.objects = [trainer, trainer.accelerator]
        return trainer

    def profiling(self, *trainer, **settings):
        return self.made("ProfilingCallback", *trainer, **settings)

    def train(self, on_step=lambda number: None, start=0, asked=None, **settings):
        if start:
            self.trainer(max_steps=start, save_strategy="steps", save_steps=start).train()
        trainer = self.trainer(on_step, **asked or {})
        with self.profiling(trainer, **settings):
            trainer.train(resume_from_checkpoint=str(self.folder / f"checkpoints/checkpoint-{start}") if start else None)
        return trainer


class Lightning(Training):
    module = "lightning"
    sigterm_in = 3  # It ends the training itself, after this iteration.

    def __init__(self, folder, package="lightning.pytorch"):
        super().__init__(folder)
        # Both are loaded: the callback must know to which of them its Trainer belongs.
        self.package = {name: importlib.import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")}[package]

    def profiling(self, **settings):
        return self.made("ProfilingCallback", **settings)

    def trainer(self, *callbacks, **asked):
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "default_root_dir": self.folder, "max_steps": 8}

        class Trainer(self.package.Trainer):
            """A Trainer of the user's own, in a module of theirs."""

        return Trainer(callbacks=list(callbacks), **quiet | asked)

    def model(self, on_step=lambda number: None, optimizers=1):
        """One model; with two optimizers it is optimized by hand."""
        losses = self.losses

        class Model(self.package.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
                self.automatic_optimization = optimizers == 1

            def training_step(self, batch):
                on_step(self.global_step)
                loss = self.layers(batch).square().mean()
                losses.append(loss.item())
                if not self.automatic_optimization:
                    for one in self.optimizers():
                        one.zero_grad()
                        self.manual_backward(self.layers(batch).square().mean())
                        one.step()
                return loss

            def validation_step(self, batch):
                self.layers(batch)

            def configure_optimizers(self):
                made = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in self.layers]
                return made if optimizers == 2 else torch.optim.AdamW(self.parameters(), lr=0.01)

        return Model()

    @staticmethod
    def batches(count=8):
        torch.manual_seed(1)
        return torch.utils.data.DataLoader(torch.randn(4 * count, 16), batch_size=4)

    def fit(self, *callbacks, model=None, batches=8, **asked):
        trainer = self.trainer(self.profiling(), *callbacks, **asked)
        trainer.fit(model or self.model(), self.batches(batches), self.batches(2))
        return trainer

    def train(self, on_step=lambda number: None, start=0, **settings):
        checkpoint = self.folder / "last.ckpt" if start else None
        if start:
            trainer = self.trainer(max_steps=start)
            trainer.fit(self.model(), self.batches())
            trainer.save_checkpoint(checkpoint)
        self.trainer(self.profiling(**settings)).fit(self.model(on_step), self.batches(), ckpt_path=checkpoint)

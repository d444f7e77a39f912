"""The student under training: DeepSpeed's engine behind one call per optimizer step.

A step takes any number of micro-batches (another number on every rank, none included) and a loss function whose values
add up: the gradient of the step is the gradient of the sum over all micro-batches of all ranks. Weights that make it a
mean are put into the loss by the caller, with global denominators. Parallelism is DeepSpeed's; nothing here is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mopd.learner.experts import SpreadExperts
from mopd.learner.forward import LossFunction, PackedLM
from mopd.learner.imbalance import LoadGuard, SplitCounts, unless
from mopd.learner.moe import ExpertLoadCounter, freeze_routers, gathered, router_hash
from mopd.learner.packing import PREFIX_GRADIENTS, MicroBatch, empty_micro_batch
from mopd.learner.raw_keys import unread_keys
from mopd.learner.router_drift import Drift, RouterDrift
from mopd.learner.routing import Replayed, RoutingReplay, gate_rules
from mopd.learner.sequence_parallel import SequenceParallel
from mopd.losses.chunked import CHUNK_BYTES

if TYPE_CHECKING:
    from mopd.learner.background import Saving

SCHEDULES = ("constant", "cosine", "linear")
# keys of DeepSpeed's own config that the learner sets, and what of ours sets them; another value would be at odds with it
OWNED = {
    "bf16": "deepspeed.dtype", "fp16": "deepspeed.dtype", "optimizer": "optimizer", "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.gradient_clip", "zero_optimization.stage": "deepspeed.zero_stage",
    "train_batch_size": "micro_batch_tokens", "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens", "managed_gradient_accumulation": "micro_batch_tokens",
    "expert_parallel": "deepspeed.autoep_size", "sequence_parallel_size": "deepspeed.sequence_parallel_size",
}


@dataclasses.dataclass
class LearnerConfig:
    """How the student is trained.

    schedule            constant, cosine or linear decay from `learning_rate` to `minimum_ratio` of it over the run
    warmup_steps        linear rise from learning_rate / (warmup_steps + 1)
    gradient_clipping   largest global gradient norm; 0 switches clipping off
    zero_stage          0, 1, 2 or 3
    dtype               float32 or bfloat16 (master weights and optimizer states stay float32)
    freeze_router       keep MoE routers as they are (the method's default for teachers and student)
    autoep_size         ranks over which DeepSpeed's AutoEP spreads the experts of every MoE layer (a divisor of the number
                        of ranks and of the number of experts); 0: every rank has all experts
    autoep_preset       how AutoEP finds the model's MoE layers; empty: by the model's type
    sequence_parallel_size   ranks that share each micro-batch's columns through DeepSpeed's Ulysses (a divisor of the number
                        of ranks and of the model's heads, see mopd.learner.sequence_parallel); 1: none do
    split_on_imbalance  token copies that one expert-parallel rank may get in a layer of one pass; a micro-batch with more is
                        halved (see mopd.learner.imbalance); 0: never
    offload_optimizer   optimizer states and master weights in the host's memory, where the update runs (zero_stage 1-3)
    offload_parameters  the weights too; each module's come to the device for its pass (zero_stage 3)
    prefix_gradient     full, or none: what fresh turns branch off is computed without a graph (see mopd.learner.packing)
    routing_replay      tokens go to the experts that their rows name (see mopd.learner.routing)
    logits_mib          memory in MiB for the logits of both models and what is made of them; sets how many loss tokens
                        a chunk has
    shm_build           let DeepSpeed compile its shared-memory collectives on CPU (1.5-2 minutes, needs a compiler)
    deepspeed           further keys for DeepSpeed's own config, which win over the ones made here
    log_file            where DeepSpeed's messages go; empty: only its errors, to stderr
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    minimum_ratio: float = 0.0
    gradient_clipping: float = 1.0
    zero_stage: int = 1
    dtype: str = "float32"
    freeze_router: bool = True
    gradient_checkpointing: bool = False
    autoep_size: int = 0
    autoep_preset: str = ""
    sequence_parallel_size: int = 1
    split_on_imbalance: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    prefix_gradient: str = "full"
    routing_replay: bool = False
    logits_mib: float = CHUNK_BYTES / 2**20
    seed: int = 0
    shm_build: bool = False
    deepspeed: dict[str, Any] = dataclasses.field(default_factory=dict)
    log_file: str = ""

    def errors(self) -> list[str]:
        """Everything wrong with this config, one sentence each."""
        found = []
        if self.schedule not in SCHEDULES:
            found.append(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.zero_stage not in (0, 1, 2, 3):
            found.append(f"zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}")
        if self.autoep_size < 0:
            found.append(f"autoep_size must be 0 (off) or more, got {self.autoep_size}")
        if self.autoep_size and self.zero_stage == 0:
            found.append("autoep_size needs zero_stage 1, 2 or 3")
        if self.split_on_imbalance < 0 or self.split_on_imbalance and not self.autoep_size:
            found.append(f"split_on_imbalance must be 0 or more and needs autoep_size, got {self.split_on_imbalance}")
        if self.offload_optimizer and self.zero_stage == 0:
            found.append("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            found.append("offload_parameters needs zero_stage 3")
        if self.dtype not in ("float32", "bfloat16"):
            found.append(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        for key, value in dict(self.deepspeed).items():
            given = [key] + [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
            found += [f"DeepSpeed's key {name} is made here; set {OWNED[name]} instead" for name in given if name in OWNED]
        if self.sequence_parallel_size < 1:
            found.append(f"sequence_parallel_size must be 1 (off) or more, got {self.sequence_parallel_size}")
        if self.sequence_parallel_size > 1 and self.prefix_gradient != "full":
            found.append("sequence_parallel_size above 1 needs prefix_gradient full: prefixes without a graph are not split")
        if self.sequence_parallel_size > 1 and self.split_on_imbalance:
            found.append("sequence_parallel_size above 1 and split_on_imbalance do not go together: each rank of a group "
                         "would halve a micro-batch in its own way")
        if self.prefix_gradient not in PREFIX_GRADIENTS:
            found.append(f"prefix_gradient must be full or none, got {self.prefix_gradient!r}")
        if self.logits_mib <= 0:
            found.append(f"logits_mib must be positive, got {self.logits_mib}")
        if self.learning_rate <= 0:
            found.append(f"learning_rate must be positive, got {self.learning_rate}")
        if self.warmup_steps < 0 or self.gradient_clipping < 0 or not 0 <= self.minimum_ratio <= 1:
            found.append("warmup_steps and gradient_clipping must not be negative, minimum_ratio must lie in [0, 1]")
        return found


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. Numbers are global over ranks unless they say otherwise.

    loss            sum of the micro-batch losses, as weighted by the caller
    gradient_norm   before clipping
    learning_rate   that was used
    tokens          real tokens in the forward pass; loss_tokens of them (or more, at branch points) carried loss
    padded_tokens   tokens computed, padding included
    micro_batches   on this rank
    expert_counts   int64 [L, E] tokens per MoE layer and expert
    splits          what split_on_imbalance did; None without it
    replayed        tokens whose routes were replayed, by MoE layer; None without routing_replay
    router_drift    of routers that are trained, after the update; None where they are frozen or there are none
    details         this rank's details, one dict per micro-batch, as the loss function returned them
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    loss_tokens: int
    padded_tokens: int
    micro_batches: int
    expert_counts: torch.Tensor
    details: list[dict[str, torch.Tensor]]
    splits: SplitCounts | None = None
    replayed: Replayed | None = None
    router_drift: Drift | None = None


def learning_rate_at(step: int, config: LearnerConfig, total_steps: int, spent: float = 0.0) -> float:
    """Learning rate of step 0, 1, …; a pure function, so that a resumed run needs no schedule state.

    spent  share of another budget than steps (sampled tokens) that is used up: after the warm-up the schedule stands
           where the further of the two is, so that a run which ends by either has annealed whole
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (max(step, spent * total_steps) - config.warmup_steps) / span)
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.minimum_ratio + (1.0 - config.minimum_ratio) * shape)


def import_deepspeed(*, shm_build: bool = False, log_file: str = ""):
    """Import DeepSpeed quietly and without its compile step; returns the module."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "deepspeed" not in sys.modules:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
    import deepspeed
    import deepspeed.ops
    if not shm_build and "__compatible_ops__" not in vars(deepspeed.ops):
        # DeepSpeed asks this table whether to compile its shared-memory collectives; without an entry it uses gloo.
        # Setting it also saves the compiler probes that filling it would run.
        deepspeed.ops.__compatible_ops__ = {}
    _quiet(logging.getLogger("DeepSpeed"), log_file)
    return deepspeed


def _quiet(logger: logging.Logger, log_file: str) -> None:
    """Send DeepSpeed's messages to `log_file`, and only its errors to stderr (it writes all to stdout by itself)."""
    for handler in list(logger.handlers):
        if type(handler) is logging.StreamHandler:
            logger.removeHandler(handler)
    if _STDERR not in logger.handlers:
        logger.addHandler(_STDERR)
    path = str(Path(log_file).absolute()) if log_file else ""
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler) and h.baseFilename != path]:
        logger.removeHandler(handler)
        handler.close()
    if path and not any(isinstance(h, logging.FileHandler) for h in logger.handlers):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if log_file else logging.ERROR)


class _Stderr(logging.Handler):
    """Errors to whatever sys.stderr is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"DeepSpeed: {self.format(record)}", file=sys.stderr)


_STDERR = _Stderr(logging.ERROR)


def start_processes(*, shm_build: bool = False, log_file: str = "", timeout: float | None = None) -> tuple[int, int]:
    """Join the process group that a launcher (torchrun, DeepSpeed, Slurm) prepared, or make one of a single process;
    returns (rank, world size). `timeout` in seconds ends a collective for which a rank does not come (by default the
    library's own, up to 30 minutes). Safe to call again."""
    deepspeed = import_deepspeed(shm_build=shm_build, log_file=log_file)
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed calls collectives by names that this torch says it will drop: once a line for every call on every rank.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    backend = get_accelerator().communication_backend_name()
    backend = "gloo" if backend == "ccl" else backend
    if not torch.distributed.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group(
                backend, timeout=None if timeout is None else datetime.timedelta(seconds=timeout))
        else:  # one process: a store in memory needs no port
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False,
                               dist_init_required=None if deepspeed.comm.is_initialized() else True)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class DeepSpeedRefuses(ValueError):
    """Keys of `deepspeed.raw` that DeepSpeed does not take; the message holds them and its words."""


class Learner:
    """A causal LM under DeepSpeed. `model` is changed in place and stays usable for sampling between steps (ZeRO 0-2).

    total_steps   length of the schedule; `spent`, set between steps, is the share of another budget that is used up
    pad_id        any valid token id, for padding
    Raises ValueError with every error of the config at once, DeepSpeedRefuses where DeepSpeed finds one in its part.
    """

    def __init__(self, model: nn.Module, *, config: LearnerConfig, total_steps: int, pad_id: int = 0):
        if errors := config.errors():
            raise ValueError("learner config: " + "; ".join(errors))
        self.config, self.total_steps, self.pad_id = config, total_steps, pad_id
        self.rank, self.world_size = start_processes(shm_build=config.shm_build, log_file=config.log_file)
        self.router_names = freeze_routers(model, config.freeze_router)
        self._drift = RouterDrift(model) if self.router_names and not config.freeze_router else None
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        deepspeed = import_deepspeed(shm_build=config.shm_build, log_file=config.log_file)
        rules = gate_rules(model) if config.routing_replay else []
        self.experts = SpreadExperts(model, config.autoep_size) if config.autoep_size else None
        self.sequence = None if config.sequence_parallel_size == 1 else SequenceParallel(
            model, config.sequence_parallel_size, rank=self.rank, world_size=self.world_size, pad_id=pad_id)
        self.module = PackedLM(model, logits_bytes=int(config.logits_mib * 2**20), over=self.sequence)
        if self.experts is not None:
            self.module.config = model.config  # AutoEP knows a model's family by it
        self._step_norm: torch.Tensor | None = None
        self._broken = ""
        groups = _parameter_groups(self.module, config.weight_decay)
        try:
            if config.deepspeed and (unread := unread_keys(self._deepspeed_config())):
                said = ", ".join(key + (f" (did you mean {' or '.join(like)}?)" if like else "") for key, like in unread)
                raise ValueError(f"it never reads the keys {said}")
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=self.module,
                model_parameters=groups,
                optimizer=self._make_optimizer,
                config=self._deepspeed_config(),
                dist_init_required=False,
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            if not config.deepspeed and not config.autoep_size:
                raise
            if config.autoep_size:
                raise DeepSpeedRefuses(f"DeepSpeed cannot spread the experts (deepspeed.autoep_size={config.autoep_size}, "
                                       f"autoep_preset={config.autoep_preset!r}, raw={dict(config.deepspeed)}): {error}"
                                       ) from error
            raise DeepSpeedRefuses(f"DeepSpeed refuses its configuration, to which deepspeed.raw adds "
                                   f"{dict(config.deepspeed)}: {error}") from error
        if config.zero_stage == 0 and config.dtype == "bfloat16":
            self.optimizer.optimizer.state.clear()  # or that step counts, and the first updates come out a quarter too small
        self.step = 0
        self.spent = 0.0
        self.waited = 0.0  # seconds of the last step in which this rank waited for others, where that can be told
        # Of mopd.learner.checkpoint: a checkpoint that is being written, and what the last one took.
        self.saving: Saving | None = None
        self.saving_seconds = 0.0
        # First of those that look at routers: the others are to see what is replayed.
        self.replay = RoutingReplay(model, rules) if config.routing_replay else None
        self.expert_loads = ExpertLoadCounter(model)
        self.guard = LoadGuard(model, config.split_on_imbalance, pad_id=pad_id, prefix_gradient=config.prefix_gradient
                               ) if config.split_on_imbalance else None
        self.router_hash = self._hash_routers() if config.freeze_router else ""
        self.has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or bool(
            getattr(model.config.get_text_config(), "attention_dropout", 0.0))

    @property
    def model(self) -> nn.Module:
        """The Hugging Face causal LM."""
        return self.module.model

    @property
    def whole(self) -> bool:
        """Whether this process has all weights in an ordinary model, to be run and copied without the other ranks."""
        return self.config.zero_stage < 3 and not self.config.autoep_size

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)

    def _deepspeed_config(self) -> dict[str, Any]:
        config = self.config
        made = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # backward() accumulates and step() reduces and updates: any number of micro-batches makes a step.
            "managed_gradient_accumulation": False,
            "steps_per_print": sys.maxsize,
            # Stage 0 in float32 clips in the optimizer's pre-hook, where the reduced gradient's norm can be read.
            "gradient_clipping": 0.0 if self._own_clipping else config.gradient_clipping,
            # DeepSpeed's own bucket, 5e8 elements whatever the model, would be most of a small model's memory.
            "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False, "reduce_bucket_size": self._bucket},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": config.dtype == "bfloat16"},
            "wall_clock_breakdown": False,
        }
        if self.experts is not None:
            made["expert_parallel"] = self.experts.config(config.autoep_preset, inside="model")
        host = {"device": "cpu", "pin_memory": self._pins}
        if config.offload_optimizer:
            made["zero_optimization"]["offload_optimizer"] = host
            made["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW: no compiler, the same numbers on every device
        if config.offload_parameters:
            made["zero_optimization"]["offload_param"] = host
        for key, value in dict(config.deepspeed).items():
            if isinstance(value, dict) and isinstance(made.get(key), dict):
                made[key] = {**made[key], **value}
            else:
                made[key] = value
        return made

    @property
    def _bucket(self) -> int:
        """Elements of the buffer in which gradients go to other ranks: all of a model's, or DeepSpeed's default."""
        return max(1, min(500_000_000, sum(p.numel() for p in self.module.parameters() if p.requires_grad)))

    @property
    def _pins(self) -> bool:
        """Whether memory of the host is page-locked, which copies to and from a device want."""
        return torch.cuda.is_available()

    @property
    def _own_clipping(self) -> bool:
        return self.config.zero_stage == 0 and self.config.dtype == "float32"

    def _make_optimizer(self, groups) -> torch.optim.Optimizer:
        config = self.config
        if self.experts is not None:
            groups = self.experts.groups(groups)
        # Every step sets the rate. At 0, because DeepSpeed's stage 0 in bfloat16 steps once on gradients of 0 to make states.
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2),
                                      eps=config.epsilon, weight_decay=config.weight_decay, fused=True)
        if self._own_clipping:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            limit = config.gradient_clipping or float("inf")

            def clip(*_):
                self._step_norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.register_step_pre_hook(clip)
        return optimizer

    def train_step(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> StepReport:
        """One optimizer step over `micro_batches` (this rank's; every rank must call it; with sequence_parallel_size
        `sequence.mine` of those of its group).

        loss_function(logits float32 [n, V], micro-batch of these tokens) -> (scalar loss, dict of detached tensors
        [n, ...]); called for a chunk of a micro-batch's loss tokens at a time (see `logits_mib`), and the losses of all
        chunks, micro-batches and ranks add up. Raises FloatingPointError for a loss (before the update) or gradient norm
        that is not finite, on all ranks alike, and again for any further step.
        """
        if self._broken:
            raise FloatingPointError(f"this learner ended at {self._broken}. Make a new one from a checkpoint")
        started, self.waited = time.perf_counter(), 0.0
        rate = learning_rate_at(self.step, self.config, self.total_steps, self.spent)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        micro_batches = self._columns(micro_batches)
        self.engine.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        details = []
        with self._seeded():
            for batch in self._agreed(micro_batches):
                batch = batch.to(self.device)
                if self.guard is None:
                    loss, detail = self._forward(batch, loss_function)
                    self._backward(loss)
                else:
                    loss, detail = self.guard.run(batch, lambda part, given_up: self._forward(
                        part, unless(given_up, loss_function)), self._backward, self._uncount)
                loss_sum += loss.detach().double()
                details.append(detail)
        counts = self.expert_loads.take().to(self.device)
        replayed = None if self.replay is None else self.replay.take().to(self.device)
        sizes = [sum(b.tokens for b in micro_batches), sum(b.loss_tokens for b in micro_batches),
                 sum(b.padded_tokens for b in micro_batches)]
        numbers = torch.cat([loss_sum[None], torch.tensor(sizes, dtype=torch.float64, device=self.device)])
        if self.world_size > 1:
            with self._waiting():
                torch.distributed.all_reduce(numbers)
            torch.distributed.all_reduce(counts)
            if replayed is not None:
                torch.distributed.all_reduce(replayed)
        loss_value, tokens, loss_tokens, padded = numbers.tolist()
        if not math.isfinite(loss_value):
            # ZeRO 2 and 3 have the bad gradients in their buffers already, so the learner does not go on.
            self._broken = f"step {self.step}: the loss is {loss_value}; no update was made"
            raise FloatingPointError(self._broken + ". Go back to a checkpoint")
        self.engine.step()
        norm = self._step_norm if self._own_clipping else self.engine.get_global_grad_norm()
        norm = float(norm) if norm is not None else float("nan")
        self.step += 1
        if not math.isfinite(norm):
            self._broken = f"step {self.step - 1}: the gradient norm is {norm}"
            raise FloatingPointError(self._broken + ". Go back to a checkpoint")
        return StepReport(
            step=self.step - 1, loss=loss_value, gradient_norm=norm, learning_rate=rate,
            seconds=time.perf_counter() - started, tokens=int(tokens), loss_tokens=int(loss_tokens),
            padded_tokens=int(padded), micro_batches=len(micro_batches), expert_counts=counts.cpu(),
            details=details[:len(micro_batches)], splits=self.guard and self.guard.take(),
            replayed=None if replayed is None else Replayed(*replayed.cpu()),
            router_drift=self._drift and self._drift.measure(self.model))

    def _forward(self, batch: MicroBatch, loss_function: LossFunction) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        replaying = contextlib.nullcontext() if self.replay is None else self.replay.counting()
        with self.expert_loads.counting(*(v for v in (batch.prefix_valid, batch.valid) if v is not None)), replaying:
            return self.engine(batch, loss_function)

    def _uncount(self) -> None:
        """The last forward pass was thrown away."""
        self.expert_loads.undo()
        if self.replay is not None:
            self.replay.undo()

    def _backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over ranks; the step wants the sum.
        self.engine.backward(loss * self.world_size if self.world_size > 1 else loss)

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[MicroBatch], function, *, split: bool = False) -> list[Any]:
        """`function(logits float32 [n, V], micro-batch of these tokens)` -> [n, ...], joined over the chunks of each
        micro-batch, in evaluation mode; expert loads do not count. Every rank must call it. `split` is for micro-batches
        of which this rank has `sequence.mine`; otherwise it computes all columns by itself."""
        was_training = self.module.training
        self.engine.eval()
        self.module.over = self.sequence if split else None
        results, micro_batches = [], self._columns(micro_batches) if split else micro_batches
        for batch in self._agreed(micro_batches):
            found = self.module.per_token(batch.to(self.device), function)
            if len(results) < len(micro_batches):
                results.append(found)
        self.module.over = self.sequence
        self.engine.train(was_training)
        return results

    def _agreed(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """The rank's micro-batches, filled up with empty ones to the largest number of any rank."""
        count = torch.tensor([len(micro_batches)], device=self.device)
        if self.world_size > 1:
            with self._waiting():
                torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
        yield from micro_batches
        for _ in range(max(1, int(count)) - len(micro_batches)):
            empty = empty_micro_batch(self.pad_id, self.config.prefix_gradient)
            yield empty if self.module.over is None else self.module.over.columns(empty)

    def _columns(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return micro_batches if self.sequence is None else [self.sequence.columns(batch) for batch in micro_batches]

    @contextlib.contextmanager
    def _waiting(self):
        """Around a collective before which a rank has no work left: its seconds are a wait for the slowest rank."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.waited += time.perf_counter() - began

    @contextlib.contextmanager
    def _seeded(self):
        """Dropout drawn from (seed, step, rank) alone, so that a resumed run draws the same."""
        if not self.has_dropout:
            yield
            return
        with torch.random.fork_rng(devices=None if self.device.type == "cuda" else []):
            torch.manual_seed((self.config.seed * 1_000_003 + self.step) * 4099 + self.rank)
            yield

    def skip_step(self) -> None:
        """Count a step without an update: a batch of which nothing was left. Every rank must call it."""
        self.step += 1

    def _hash_routers(self) -> str:
        return router_hash(self.model, self.experts and self.experts.router_name)

    def check_routers(self) -> None:
        """Raise RuntimeError when a frozen router is not what it was at the start."""
        if self.config.freeze_router and self.router_names and self._hash_routers() != self.router_hash:
            raise RuntimeError("a frozen router changed during training; look at the optimizer's groups")

    def close(self) -> None:
        """Take hooks off and give DeepSpeed's buffers back; the model keeps its trained weights, whole on every rank
        (also under ZeRO-3, so every rank must call it and have room for them)."""
        if self.saving is not None:
            self.saving.wait()
        self.expert_loads.close()
        if self.replay is not None:
            self.replay.close()
        if self.guard is not None:
            self.guard.close()
        whole = {}
        for parameter in self.module.parameters():
            # The weights are views of DeepSpeed's flat buffers (or split): take a copy before those go.
            with gathered(parameter):
                whole[parameter] = parameter.data.clone()
            parameter.grad = None
        self.engine.destroy()
        if self.config.zero_stage < 3:
            for parameter, data in whole.items():
                parameter.data = data
            return
        fresh = {old: nn.Parameter(data, requires_grad=old.requires_grad) for old, data in whole.items()}
        for module in self.module.modules():
            module._parameters = {name: fresh.get(p, p) for name, p in module._parameters.items()}


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; norms and biases without. Parameters that do not train are in no group."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    dimensions = [len(getattr(p, "ds_shape", p.shape)) for p in trained]
    matrices = [p for p, d in zip(trained, dimensions, strict=True) if d >= 2]
    vectors = [p for p, d in zip(trained, dimensions, strict=True) if d < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]

"""DeepSpeed behind one door: a batch in, an updated policy out. One instance per rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from learner import device
from learner.logprobs import PolicyModel
from learner.lora import insert_adapter, is_adapter
from learner.objective import Objective
from learner.parking import Parking

ADAM_BETAS = (0.9, 0.999)


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Everything a rank needs to know, resolved."""

    model: str
    """Directory of the model to start from."""
    rank: int
    """This process."""
    ranks: int
    """Processes in all."""
    device: str
    """cpu or cuda."""
    dtype: str
    """float32 or bfloat16."""
    zero_stage: int
    """DeepSpeed ZeRO stage."""
    lr: float
    """Learning rate after warm-up."""
    warmup_steps: int
    """Steps over which it rises."""
    weight_decay: float
    """AdamW weight decay."""
    grad_clip: float
    """Largest gradient norm; 0 means none."""
    microbatch_tokens: int
    """Padded tokens per microbatch."""
    objective: Objective
    """What is minimised."""
    score_temperature: float
    """Temperature log-probs are scored at."""
    old_logprobs: str
    """recompute or sampler."""
    ref_refresh_steps: int
    """Steps between refreshes of the reference; 0 means never."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    offload: bool
    """Optimizer state in host memory."""
    sentinel_rows: int
    """Responses each rank scores before it trains, to compare with the engine."""
    mismatch_limit: float
    """Largest difference allowed there."""
    collective_timeout: float
    """Seconds a collective may take."""
    seed: int
    """Seed of torch (dropout)."""
    lora_rank: int = 0
    """Rank of the adapter that is trained instead of the weights; 0 means none."""
    lora_alpha: float = 0.0
    """Its output is multiplied by alpha / rank."""

    @property
    def lora_scaling(self) -> float:
        """What B carries when it is sent to an engine."""
        return self.lora_alpha / self.lora_rank if self.lora_rank else 1.0


class LearnerEngine:
    """The policy of one rank: model, optimizer, and what DeepSpeed needs around them."""

    def __init__(self, settings: LearnerSettings, host: str, port: int) -> None:
        """Join the ranks at host:port and load the model; takes seconds."""
        self.settings = settings
        self.steps_done = 0
        torch.manual_seed(settings.seed)
        deepspeed = _join(settings, host, port)
        self.attention = device.attention(settings.device, settings.dtype)
        model = load_model(settings.model, settings.dtype, self.attention)
        self.packs = self.attention != "sdpa" and can_be_packed(model)
        if settings.lora_rank:
            insert_adapter(model, settings.lora_rank, settings.lora_alpha)
        self.policy = PolicyModel(model)
        if settings.gradient_checkpointing:
            self.policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(
            [p for p in self.policy.parameters() if p.requires_grad],
            lr=settings.lr,
            betas=ADAM_BETAS,
            weight_decay=settings.weight_decay,
        )
        self._plain = settings.zero_stage == 0 and settings.dtype == "float32"
        self._norm = torch.tensor(0.0)
        if self._plain:
            optimizer.register_step_pre_hook(self._clip)
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.policy, optimizer=optimizer, config=deepspeed_config(settings), dist_init_required=False
        )
        self.device = self.deepspeed.device
        self._parking = Parking(self.deepspeed, settings.zero_stage, self.device)

    def score(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the targets, with gradient where it is enabled (PolicyModel.forward)."""
        result: tuple[torch.Tensor, torch.Tensor] = self.deepspeed(
            tensors["input_ids"],
            tensors["positions"],
            tensors["targets"],
            self.settings.score_temperature,
            tensors.get("position_ids"),
        )
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a share of the minibatch's loss.

        DeepSpeed averages over ranks, while the loss is already divided by global counts: multiply back.
        """
        self.deepspeed.backward(loss * self.settings.ranks)

    def local_gradients_finite(self) -> bool:
        """False when a gradient accumulated on this rank is not finite (plain stage only; ZeRO checks by itself).

        DeepSpeed's stage 0 in float32 applies NaN gradients, so the ranks vote on this before the step.
        """
        if not self._plain:
            return True
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        return all(bool(torch.isfinite(g).all()) for g in grads)

    def drop_gradients(self) -> None:
        """Forget what was accumulated (a skipped step)."""
        self.deepspeed.optimizer.zero_grad()
        self.deepspeed.zero_grad()

    def step(self) -> tuple[bool, float]:
        """Apply the accumulated gradient. Returns (applied, gradient norm before clipping)."""
        rate = self.learning_rate()
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate
        self.deepspeed.step()
        norm = self._norm if self._plain else self.deepspeed.get_global_grad_norm()
        return bool(self.deepspeed.was_step_applied()), float(norm if norm is not None else "nan")

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        warmup = self.settings.warmup_steps
        return self.settings.lr * min(1.0, (self.steps_done + 1) / warmup if warmup else 1.0)

    def all_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM)

    def all_max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX)

    def gathered(self, bucket_bytes: int, *, adapter_only: bool = False) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole parameters in buckets, by their own names. A collective under ZeRO-3: every rank must walk through it.

        `adapter_only` leaves out what LoRA has frozen.
        """
        import deepspeed

        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, parameter in self.policy.hf.named_parameters():
            if adapter_only and not is_adapter(name):
                continue
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.settings.zero_stage == 3):
                tensor = parameter.detach()
                tensor = tensor.clone() if self.settings.zero_stage == 3 else tensor
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
            if size >= bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def park(self) -> None:
        """Leave the device's memory to the engine beside this rank: optimizer state goes to host memory (Parking)."""
        if not self.settings.offload:  # then it is there already
            self._parking.park()

    def unpark(self) -> None:
        """Take the memory back, before learning."""
        self._parking.unpark()

    def _reduced(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        """NCCL reduces only what lies on the device."""
        moved = values.to(self.device)
        torch.distributed.all_reduce(moved, how)
        return moved.to(values.device)

    def close(self) -> None:
        """Leave the group of ranks."""
        torch.distributed.destroy_process_group()

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs between DeepSpeed's reduction and the update, where the whole gradient stands in `.grad`."""
        limit = self.settings.grad_clip or float("inf")
        self._norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit, error_if_nonfinite=True)


def load_model(directory: str, dtype: str, attention: str = "sdpa") -> Any:
    """A transformers causal LM, on the CPU; no code of the model directory is run. `attention`: transformers' name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
    )
    model.config.use_cache = False
    model.train()
    return model


def can_be_packed(model: Any) -> bool:
    """Whether rows laid end to end stay apart: in attention they do, in recurrent layers a state runs on."""
    kinds = getattr(model.config, "layer_types", None) or ()
    recurrent = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "chunked_attention")]
    return not recurrent and not getattr(model, "_is_stateful", False)


def deepspeed_config(settings: LearnerSettings) -> dict[str, Any]:
    """What DeepSpeed is told."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.can_pin(settings.device)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # `step()` is the boundary: any number of microbatches may come before it.
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if settings.zero_stage == 0 and settings.dtype == "float32" else settings.grad_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        # The optimizer is torch's AdamW: no compiler is needed at first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }


def _join(settings: LearnerSettings, host: str, port: int) -> Any:
    """Set up the process group of the ranks and return the deepspeed module."""
    os.environ |= {
        "RANK": str(settings.rank),
        "LOCAL_RANK": str(device.local_rank(settings.device, settings.rank)),
        "WORLD_SIZE": str(settings.ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    import deepspeed
    import deepspeed.ops

    for operator in device.operators_to_leave_out(settings.device):
        deepspeed.ops.__compatible_ops__[operator] = False
    deepspeed.init_distributed(
        dist_backend=device.collectives(settings.device),
        timeout=timedelta(seconds=settings.collective_timeout),
        verbose=False,
    )
    return deepspeed

"""Expected seconds of each phase of a round on GPUs, with what bounds it. Closed forms; the simulator plays it out.

A phase takes the largest of what it has to compute, to read and to send, each at a share of the device's peak that is
reached in practice (the constants below are the assumptions of every figure).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planner.architecture import Architecture
from cluster.planner.devices import Device
from cluster.planner.work import Work

TRAINING = 0.40
"""Share of peak FLOPs in forward and backward passes of dense models of billions of parameters."""
PREFILL = 0.50
"""Share of peak FLOPs when reading prompts, and of decoding with many responses at once."""
READING = 0.70
"""Share of the memory bandwidth while decoding."""
LINKS = 0.70
"""Share of a link's bandwidth in collectives."""
ENGINE_STEP = 0.003
"""Seconds an engine step takes beside the device's work: scheduling, sampling, launches."""
ENGINE_RESPONSE = 10e-6
"""Seconds of the same for each response in the step."""
REDUCE_LATENCY = 15e-6
"""Seconds of one small all-reduce between the devices of an engine."""
PADDING = 1.08
"""Padded over real tokens when microbatches are sorted by length."""
MICROBATCH = 0.015
"""Seconds of one forward pass over a microbatch beside the device's work (a backward pass: two)."""
OPTIMIZER_BYTES = 32
"""Bytes read and written per parameter by AdamW with float32 master weights."""
HOST_LINK = 20e9
"""Bytes per second between a GPU and its host, reached in practice."""
HOST_OPTIMIZER = 10e9
"""Bytes per second per rank of AdamW on the host (torch's, on a few cores)."""
SYNC_FIXED = 0.5
"""Seconds of a sync that no size explains: calls, receipts, cache reset."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a round."""

    name: str
    """generate, old log-probs, learn, optimizer, sync, turn."""
    seconds: float
    """Expected."""
    bound: str
    """What limits it."""
    arithmetic: str
    """How the figure comes about."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines, or ranks, and the links between their devices."""

    processes: int
    """Engines or ranks."""
    devices: int
    """GPUs of each."""
    gpus_per_node: int
    """GPUs of a node."""

    def link(self, device: Device) -> float:
        """Bytes per second between the members, one direction: the network as soon as they span nodes."""
        return device.link if self.processes * self.devices <= self.gpus_per_node else device.network


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds of one engine step, affine in the responses and in the tokens they look back on.

    The device reads weights and cache and computes at the same time; what the step costs beside the device is added.
    """

    host: float
    """Scheduling, sampling and launches, per step."""
    host_response: float
    """The same per response."""
    weights: float
    """Reading the weights."""
    context: float
    """Reading the KV cache, per token looked back on."""
    compute: float
    """FLOPs, per response."""
    between: float = 0.0
    """Reductions between the devices of an engine: latency."""
    sent: float = 0.0
    """The same per response: bandwidth."""

    def parts(self, responses: float, context: float) -> dict[str, float]:
        """Seconds by what takes them, for so many responses that look back on so many tokens each."""
        reading = self.weights + self.context * context * responses
        compute = self.compute * responses
        parts = {
            "what the engine does beside the GPU's work": self.host + self.host_response * responses,
            "sending between the GPUs of an engine": self.between + self.sent * responses,
        }
        if compute > reading:
            return parts | {"FLOPs of decoding": compute}
        return parts | {"reading the weights": self.weights, "reading the KV cache": reading - self.weights}

    def seconds(self, responses: float, context: float) -> float:
        """One step."""
        return sum(self.parts(responses, context).values())


def decoding(model: Architecture, device: Device, split: int, kv_bytes: int) -> Decoding:
    """The cost of a decoding step of an engine over `split` devices, `kv_bytes` of KV cache per token and device."""
    read = device.bandwidth * READING
    # The embedding is looked up, not read; a tied one is read as the output layer.
    weights = 2 * (model.parameters - (0 if model.tied else model.embedding)) / split
    several = split > 1
    return Decoding(
        host=ENGINE_STEP,
        host_response=ENGINE_RESPONSE,
        weights=weights / read,
        context=kv_bytes / read,
        compute=model.forward_flops(1, 0) / (split * device.flops * PREFILL),
        between=2 * model.layers * REDUCE_LATENCY if several else 0.0,
        sent=2 * model.layers * 2 * model.hidden / (device.link * LINKS) if several else 0.0,
    )


def generate(model: Architecture, device: Device, work: Work, engines: int, cost: Decoding, room: int) -> Phase:
    """All responses of a round; `room` is the responses one engine has KV cache for at their mean length.

    An engine makes as many steps as its longest response has tokens, or more when its responses take turns; a step
    costs what its mean number of responses makes it cost (exact while the cost is affine).
    """
    share = work.responses / engines
    at_once = min(share, work.max_num_seqs, room)
    turns = share * work.response_tokens / at_once
    steps = max(float(work.longest), turns)
    running = share * work.response_tokens / steps
    context = work.prompt_tokens + work.response_tokens / 2
    seconds = steps * cost.seconds(running, context)
    read = model.forward_flops(int(work.prompt_tokens * work.prompts / engines), work.prompt_tokens / 2, scored=0)
    prefill = read / (device.flops * PREFILL)
    parts = cost.parts(running, context)
    bound = max(parts, key=lambda name: parts[name])
    if steps > turns and running < at_once / 2:
        bound += ", with few responses left beside the longest ones"
    said = (
        f"{share:,.0f} responses per engine, {at_once:,.0f} at once: {steps:,.0f} steps with {running:,.0f} on average "
        f"x {1000 * cost.seconds(running, context):.1f} ms + {prefill:.1f} s for prompts"
    )
    return Phase("generate", seconds + prefill, bound, said)


def pass_seconds(model: Architecture, device: Device, work: Work, ranks: int) -> float:
    """One forward pass of the learner over all rows of the round, compute only."""
    length = work.prompt_tokens + work.response_tokens
    flops = model.forward_flops(1, length / 2, scored=0) * work.rows + 2.0 * model.embedding * work.tokens
    return flops * PADDING / (ranks * device.flops * TRAINING)


def learn(
    model: Architecture, device: Device, work: Work, pool: Pool, zero_stage: int, checkpointing: bool, offload: bool
) -> list[Phase]:
    """Old log-probs, forward and backward passes, and optimizer steps of a round."""
    ranks = pool.processes
    once = pass_seconds(model, device, work, ranks)
    per_rank = work.rows * PADDING / ranks
    budget = max(work.microbatch_tokens, work.prompt_tokens + work.response_tokens)
    microbatches = max(work.minibatches, per_rank / budget)
    forward, training, per_step = sends(model, device, pool, zero_stage, checkpointing, work.adapter)
    phases = []
    if work.old_logprobs and work.minibatches > 1:
        share = 1 - 1 / work.minibatches
        phases.append(_passes("old log-probs", 1.0, share * once, share * microbatches, forward))
    if work.reference:
        phases.append(_passes("reference", 1.0, once, microbatches, forward))
    training += per_step * work.minibatches / microbatches
    phases.append(_passes("learn", 4.0 if checkpointing else 3.0, once, microbatches, training))
    trained = work.adapter or model.parameters
    seconds, bound, said = optimizer_step(trained, device, ranks, zero_stage, offload)
    return [*phases, Phase("optimizer", work.minibatches * seconds, bound, f"{work.minibatches} steps of {said}")]


def optimizer_step(
    parameters: int, device: Device, ranks: int, zero_stage: int, offload: bool
) -> tuple[float, str, str]:
    """Seconds of one optimizer step, what bounds it, and the arithmetic."""
    own = parameters / (ranks if zero_stage else 1)
    said = f"{own / 1e9:.2f} B parameters per rank"
    if offload:
        seconds = own * 6 / HOST_LINK + own * OPTIMIZER_BYTES / HOST_OPTIMIZER
        return seconds, "host memory", f"{said}: 6 bytes over the host link, {OPTIMIZER_BYTES} in host memory"
    seconds = own * OPTIMIZER_BYTES / (device.bandwidth * READING)
    return seconds, "reading the optimizer state", f"{said} x {OPTIMIZER_BYTES} bytes"


def sends(
    model: Architecture, device: Device, pool: Pool, zero_stage: int, checkpointing: bool, adapter: int = 0
) -> tuple[float, float, float]:
    """Seconds of communication of a forward pass over a microbatch, of all its passes in training, and of a step.

    ZeRO-3 gathers the weights for every pass and scatters the gradients; stage 2 reduces them in every microbatch,
    stages 0 and 1 once per step, there and back. Gradients are those of the adapter when only that is trained.
    """
    each = 2.0 * (pool.processes - 1) / pool.processes / (pool.link(device) * LINKS)
    gathered, moved = each * model.parameters, each * (adapter or model.parameters)
    if zero_stage == 3:
        return gathered, (3 if checkpointing else 2) * gathered + moved, 0.0
    return 0.0, moved if zero_stage == 2 else 0.0, moved if zero_stage == 2 else 2 * moved


def _passes(name: str, passes: float, once: float, microbatches: float, sent: float) -> Phase:
    """Microbatches that compute and send at the same time."""
    each = passes * once / microbatches
    seconds = microbatches * (max(each, sent) + passes * MICROBATCH)
    bound = "FLOPs" if each >= sent else "sending weights and gradients between ranks"
    said = f"{microbatches:,.0f} microbatches per rank, each {each:.2f} s of compute beside {sent:.2f} s of sending"
    return Phase(name, seconds, bound, said)


def sync(parameters: int, device: Device, ranks: Pool, engines: Pool, colocated: bool) -> Phase:
    """New weights for every engine: gathered from the ranks, then to each engine's devices."""
    size = 2.0 * parameters
    gather = ranks.link(device) * LINKS
    one_node = ranks.processes + engines.processes * engines.devices <= ranks.gpus_per_node
    send = (device.link if colocated or one_node else device.network) * LINKS
    seconds = SYNC_FIXED + size / gather + size / send
    said = f"{size / 1e9:.0f} GB gathered at {gather / 1e9:.0f} GB/s, sent at {send / 1e9:.0f} GB/s + {SYNC_FIXED} s"
    return Phase("sync", seconds, "links", said)


def turn(parameters: int, ranks: int, zero_stage: int) -> Phase:
    """Colocated: the optimizer state goes to host memory before generation and comes back after it."""
    size = 12.0 * parameters / (ranks if zero_stage else 1)
    said = f"{size / 1e9:.0f} GB of optimizer state per rank out and back, + 2 s for the engines to wake"
    return Phase("taking turns", 2 * size / HOST_LINK + 2.0, "host link", said)

"""`launch.py plan`: the arithmetic of a run before it is started, here or on GPUs that are only named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from cluster.errors import BAD_REQUEST, DONE, PlanError
from cluster.joining import resources_at
from cluster.model_facts import read_model_facts
from cluster.plan import Plan, make_plan
from cluster.plan_text import plan_text
from cluster.planner import capacity
from cluster.planner.architecture import Architecture, read_architecture
from cluster.planner.cpu import MEASURED
from cluster.planner.devices import device_called
from cluster.planner.split import Cluster
from cluster.planner.work import Work
from cluster.resources import Resources, gpu_name
from cluster.run import cli
from cluster.run.config import Config
from cluster.run.inputs import check_rows


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan` alone, beside all options of a run."""

    gpu: str = ""
    """Plan for GPUs of this kind (h100, a100-80gb, ...) instead of this machine."""
    gpus: int = 8
    """How many of them, in all."""
    gpus_per_node: int = 8
    """How many in one node."""
    prompt_length: int | None = None
    """Mean tokens of a prompt (default: 256, or 6 for the demo)."""
    response_length: int | None = None
    """Mean tokens of a response (default: half of the longest)."""
    simulate: bool = False
    """Also play runs out on a virtual clock: which placement, schedule, lag and split pays, what a failure costs."""
    lengths: Literal["lognormal", "uniform", "fixed"] = "lognormal"
    """With --simulate: how long responses are, about their mean and at most the longest."""
    length_spread: float = 0.8
    """With --simulate: standard deviation of the logarithm of a lognormal length."""


def main(words: list[str]) -> int:
    """Print the plan; 0 when it can work, 2 when it does not fit."""
    if {"-h", "--help"} & set(words):
        parser: Any = tyro.extras.get_parser(PlanOptions, prog="launch.py plan")  # its methods carry no types
        sys.stdout.write(parser.format_help() + "\n")
    options, rest = tyro.cli(PlanOptions, prog="launch.py plan", args=words, return_unknown_args=True, add_help=False)
    config = cli.parse(rest, "launch.py plan")
    cluster = _cluster(options)
    resources = resources_at(config.cluster.address) if cluster is None else capacity.named_resources(cluster)
    cluster = cluster or _local_cluster(config, resources, gpu_name)
    plan = make_plan(config, resources, read_model_facts(config.model))
    check_rows(config, plan)
    sys.stdout.write(plan_text(config, plan, resources) + "\n")
    text, fits = _capacity(options, config, plan, resources, cluster)
    sys.stdout.write(text + "\n")
    if options.simulate and fits and not text.startswith("capacity"):
        sys.stdout.write("\n".join(_simulation(options, config, plan, resources, cluster)) + "\n")
    return DONE if fits else BAD_REQUEST


def _cluster(options: PlanOptions) -> Cluster | None:
    """The GPUs that were named, or None for this machine."""
    if not options.gpu:
        if (options.gpus, options.gpus_per_node) != (PlanOptions.gpus, PlanOptions.gpus_per_node):
            raise PlanError(f"--gpus {options.gpus}: of which kind? Add --gpu, for example --gpu h100.")
        return None
    for flag, value in (("--gpus", options.gpus), ("--gpus-per-node", options.gpus_per_node)):
        if value < 1:
            raise PlanError(f"{flag} {value}: must be at least 1.")
    return capacity.named_cluster(options.gpu, options.gpus, options.gpus_per_node)


def _local_cluster(config: Config, resources: Resources, name: Callable[[], str]) -> Cluster | None:
    """The GPUs of this machine, when there are any in the table and the run may use them; `name` asks the driver."""
    if not resources.gpus or config.cluster.placement == "cpu":
        return None
    device = device_called(name())
    return None if device is None else Cluster(device, resources.gpus, resources.gpus)


def _capacity(
    options: PlanOptions, config: Config, plan: Plan, resources: Resources, cluster: Cluster | None
) -> tuple[str, bool]:
    """Memory and time as text, and whether it fits. PlanError for named GPUs and a model that is not known here."""
    try:
        model, work = _model_and_work(options, config, plan)
    except PlanError as unknown:
        if options.gpu:
            raise
        return f"capacity   memory and time are not worked out: {unknown}", True  # the run itself may work all the same
    if cluster is not None:
        return capacity.gpu_text(config, plan, model, work, cluster)
    if plan.device == "cpu":
        return capacity.cpu_text(config, plan, model, work, resources)
    return "capacity   these GPUs are not in the table: for memory and time name similar ones, as in --gpu h100", True


def _model_and_work(options: PlanOptions, config: Config, plan: Plan) -> tuple[Architecture, Work]:
    model = read_architecture(plan.model.path)
    known = capacity.MeanLengths(options.prompt_length, options.response_length)
    return model, capacity.work_of(config, plan, model, known)


def _simulation(
    options: PlanOptions, config: Config, plan: Plan, resources: Resources, cluster: Cluster | None
) -> list[str]:
    """What the simulator answers, as lines."""
    from cluster.simulator.answers import compare, incidents
    from cluster.simulator.build import on_cores
    from cluster.simulator.lengths import Lengths
    from cluster.simulator.text import comparison_lines, incident_lines, round_lines
    from cluster.simulator.world import simulate

    model, work = _model_and_work(options, config, plan)
    lengths = Lengths(options.lengths, work.response_tokens, work.longest, options.length_spread)
    if cluster is not None:
        found = compare(model, work, cluster, lengths)
        calm = found[0][1]
        return comparison_lines(found, lengths) + incident_lines(calm, incidents(calm.scenario, calm))
    if plan.device != "cpu":
        return []
    split = capacity.cpu_split(config, plan, resources)
    outcome = simulate(on_cores(model, work, split, MEASURED, lengths, rounds=3))
    return round_lines(outcome) + incident_lines(outcome, incidents(outcome.scenario, outcome))

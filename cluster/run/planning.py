"""`launch.py plan`: the arithmetic of a run before it is started, here or on GPUs that are only named."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import tyro

from cluster.errors import BAD_REQUEST, DONE, PlanError
from cluster.plan import Plan, make_plan, plan_text, read_model_facts
from cluster.planner import capacity
from cluster.planner.architecture import read_architecture
from cluster.planner.split import Cluster
from cluster.resources import Resources, local_resources
from cluster.run import cli
from cluster.run.config import Config
from rollout.prompts import check_prompts


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


def main(words: list[str]) -> int:
    """Print the plan; 0 when it can work, 2 when it does not fit."""
    if {"-h", "--help"} & set(words):
        parser: Any = tyro.extras.get_parser(PlanOptions, prog="launch.py plan")  # its methods carry no types
        sys.stdout.write(parser.format_help() + "\n")
    options, rest = tyro.cli(PlanOptions, prog="launch.py plan", args=words, return_unknown_args=True, add_help=False)
    config = cli.parse(rest, "launch.py plan")
    check_prompts(config.prompts, config.data, answer_required=not config.reward_function)
    cluster = _cluster(options)
    resources = local_resources() if cluster is None else capacity.named_resources(cluster)
    plan = make_plan(config, resources, read_model_facts(config.model))
    sys.stdout.write(plan_text(config, plan, resources) + "\n")
    text, fits = _capacity(options, config, plan, resources, cluster)
    sys.stdout.write(text + "\n")
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


def _capacity(
    options: PlanOptions, config: Config, plan: Plan, resources: Resources, cluster: Cluster | None
) -> tuple[str, bool]:
    """Memory and time as text, and whether it fits."""
    model = read_architecture(plan.model.path)
    lengths = capacity.Lengths(options.prompt_length, options.response_length)
    work = capacity.work_of(config, plan, model, lengths)
    if cluster is not None:
        return capacity.gpu_text(config, plan, model, work, cluster)
    if plan.device == "cpu":
        return capacity.cpu_text(config, plan, model, work, resources)
    return "capacity   memory and time: name the GPUs, for example --gpu h100 --gpus 8", True

"""vLLM behind one door: groups of token ids in, groups of responses out, weights replaced between rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.types import Group, GroupRequest, Probe, Receipt, WeightBucket

CPU_ENVIRONMENT = {
    # The engine core stays in this process: nothing to orphan, and tensors need no pickling.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # "auto" pins OpenMP threads to cores and would pin every engine to the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Log-prob ranks are computed by a compiled function even in eager mode; compiling it costs 14 s at first use.
    "TORCHDYNAMO_DISABLE": "1",
    # oneDNN keeps a kernel for every batch size it has met, up to 1024: 450 MB more over ten rounds, and no faster.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
GPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


ADAPTER_NAME, ADAPTER_ID = "policy", 1
LORA_CAPACITIES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks vLLM makes room for."""


def lora_capacity(rank: int) -> int:
    """The smallest rank vLLM makes room for that holds this one."""
    return min(capacity for capacity in LORA_CAPACITIES if capacity >= rank)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine needs to know, resolved."""

    model: str
    """Directory of the model the engine starts from."""
    index: int
    """Which engine this is."""
    seed: int
    """Seed of the engine itself; distinct per engine, though every response carries its own."""
    dtype: str
    """float32 or bfloat16."""
    max_model_len: int
    """Longest prompt plus response, tokens."""
    max_num_seqs: int
    """Responses generated at once."""
    tensor_parallel: int
    """Devices the engine is spread over."""
    device: str
    """cpu or cuda."""
    gpu_memory: float
    """Share of a GPU's memory."""
    kv_cache_gib: float
    """KV cache on a CPU, GiB."""
    processed_logprobs: bool
    """Log-probs of the distribution that was sampled from (True unless scoring at temperature 1 was asked for)."""
    lora_rank: int = 0
    """Rank of the adapter the policy consists of, beside the model of the directory; 0 means none."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled."""

    temperature: float
    """0 means greedy."""
    top_p: float
    """Nucleus."""
    top_k: int
    """0 means all."""
    max_new_tokens: int
    """Longest response."""
    stop_token_ids: tuple[int, ...]
    """End tokens."""
    fixed_length: bool = False
    """Generate exactly `max_new_tokens` tokens, past any end token (for timing)."""


class EngineFault(RuntimeError):
    """The engine broke its contract (missing or non-finite log-prob): it must be replaced."""


class RolloutEngine:
    """One vLLM engine."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model; takes seconds. `CPU_ENVIRONMENT` or `GPU_ENVIRONMENT` must be set before vllm is imported."""
        from vllm import LLM

        if settings.device == "cpu":
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(settings.kv_cache_gib)))
        options: dict[str, Any] = {"gpu_memory_utilization": settings.gpu_memory} if settings.device == "cuda" else {}
        if settings.lora_rank:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_capacity(settings.lora_rank)}
        if settings.tensor_parallel > 1:
            options |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
        self.settings = settings
        self.version = -1
        self._llm = LLM(
            model=settings.model,
            dtype=settings.dtype,
            seed=settings.seed,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            # Seeded requests crash the CPU engine when a prefill is split, so a prefill must fit one batch.
            enable_chunked_prefill=settings.device != "cpu",
            max_num_batched_tokens=max(16384, settings.max_model_len),
            enforce_eager=settings.device == "cpu",
            disable_log_stats=True,
            logprobs_mode="processed_logprobs" if settings.processed_logprobs else "raw_logprobs",
            worker_extension_cls="rollout.weights.WeightReceiver",
            **options,
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._next_id = 0

    def generate(
        self, requests: Sequence[GroupRequest], sampling: Sampling, tick: float = 0.5
    ) -> Iterator[tuple[list[Group], int]]:
        """Generate whole groups; yields (groups finished since the last time, tokens made so far) every `tick` seconds.

        An item with no group in it is a sign of life. Raises EngineFault when a log-prob is missing or not finite.
        """
        engine = self._llm.llm_engine
        waiting = {self._add(request, sampling): request for request in requests}
        done: list[Group] = []
        tokens, last = 0, time.monotonic()
        try:
            while waiting:
                for output in engine.step():
                    if output.finished:
                        group = self._group(waiting.pop(output.request_id), output)
                        tokens += len(group.token_ids)
                        done.append(group)
                if time.monotonic() - last >= tick:
                    yield done, tokens
                    done, last = [], time.monotonic()
            yield done, tokens
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def begin_load(self) -> None:
        """Start taking new weights."""
        self._rpc("begin_load")

    def load_bucket(self, bucket: WeightBucket) -> int:
        """Take some tensors; returns how many."""
        return int(self._rpc("load_bucket", bucket))

    def open_channel(self, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        """Join a broadcast group as ranks `rank ..` (one per device)."""
        self._rpc("open_channel", host, port, rank, size, timeout)

    def receive_bucket(self, names: list[str], shapes: list[tuple[int, ...]], dtype: str) -> int:
        """Take some tensors by broadcast; returns how many."""
        return int(self._rpc("receive_bucket", names, shapes, dtype))

    def close_channel(self) -> None:
        """Leave the broadcast group."""
        self._rpc("close_channel")

    def finish_load(self, version: int, probe: Probe) -> Receipt:
        """Finish taking weights, empty the prefix cache, and prove what is now held."""
        started = time.monotonic()
        self._rpc("finish_load")
        reset = bool(self._llm.reset_prefix_cache())
        digests = self._rpc("read_back", dict(probe.columns))
        self.version = version
        return Receipt(self.settings.index, version, digests, reset, time.monotonic() - started)

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def _add(self, request: GroupRequest, sampling: Sampling) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._next_id += 1
        name = str(self._next_id)
        greedy = sampling.temperature == 0
        params = SamplingParams(
            n=request.group_size,
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=None if greedy else request.seed,  # child k of the request gets seed + k
            stop_token_ids=[] if sampling.fixed_length else list(sampling.stop_token_ids),
            ignore_eos=sampling.fixed_length,
            logprobs=0,  # the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.prompt.token_ids.tolist()}
        self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter())
        return name

    def _adapter(self) -> Any:
        """What tells vLLM to use the adapter; WeightReceiver put it there, so vLLM never looks for its files."""
        if not self.settings.lora_rank:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "the adapter arrives with the weights and has no file")

    def _group(self, request: GroupRequest, output: Any) -> Group:
        responses = sorted(output.outputs, key=lambda response: response.index)
        ids = [np.asarray(response.token_ids, dtype=np.int32) for response in responses]
        return Group(
            request=request,
            weights_version=self.version,
            token_ids=np.concatenate(ids),
            sampler_logprobs=np.concatenate(
                [self._logprobs(request, response, tokens) for response, tokens in zip(responses, ids, strict=True)]
            ),
            lengths=np.asarray([len(tokens) for tokens in ids], dtype=np.int32),
            finished=np.asarray([response.finish_reason == "stop" for response in responses]),
            texts=tuple(self._tokenizer.batch_decode(ids, skip_special_tokens=False)),
            engine=self.settings.index,
        )

    def _logprobs(self, request: GroupRequest, response: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sampler log-probs of one response, looked up by sampled id; never a default in place of a missing one."""
        flat = response.logprobs
        if flat is None or len(flat.logprobs) != len(ids) or not np.array_equal(flat.token_ids, ids):
            raise EngineFault(f"engine {self.settings.index}: log-probs are missing for row {request.prompt.row_id}")
        values = np.asarray(flat.logprobs, dtype=np.float32)
        if not np.isfinite(values).all() or (values > 1e-3).any():
            raise EngineFault(
                f"engine {self.settings.index}: row {request.prompt.row_id} response {response.index} has a log-prob "
                f"that is not finite or above 0 ({values.min()} to {values.max()})"
            )
        return values

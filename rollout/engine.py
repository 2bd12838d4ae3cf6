"""vLLM behind one door: groups of token ids in, groups of responses out, weights replaced between rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.device import llm_options
from rollout.types import Group, GroupRequest, Probe, Receipt, SharedBucket, WeightBucket

UPDATE_BACKEND = "rollearn"
"""Name under which rollout/weights.py registers with vLLM's weight-update API."""
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
    sleeps: bool = False
    """The engine gives its memory up while others use the device (colocated)."""
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

    def __init__(self, text: str, key: tuple[str, int]) -> None:
        """`key` says which group it was (GroupRequest.key)."""
        super().__init__(text)
        self.key = key

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, int]]]:
        """Picklable with both arguments."""
        return (type(self), (str(self), self.key))


class RolloutEngine:
    """One vLLM engine."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model; takes seconds. `device.environment` must be set before vllm is imported."""
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        options = llm_options(
            settings.device,
            kv_cache_gib=settings.kv_cache_gib,
            gpu_memory=settings.gpu_memory,
            sleeps=settings.sleeps,
        )
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
            # Room for a whole prefill: where it is not split (CPU), it must fit one batch.
            max_num_batched_tokens=max(16384, settings.max_model_len),
            disable_log_stats=True,
            logprobs_mode="processed_logprobs" if settings.processed_logprobs else "raw_logprobs",
            worker_extension_cls="rollout.weights.WeightReceiver",
            weight_transfer_config=WeightTransferConfig(backend=UPDATE_BACKEND),
            **options,
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._next_id = 0
        self._loading = False

    def generate(
        self, requests: Sequence[GroupRequest], sampling: Sampling, tick: float = 0.5
    ) -> Iterator[tuple[list[Group], int]]:
        """Generate whole groups; yields (groups finished since the last time, tokens made so far) every `tick` seconds.

        An item with no group in it is a sign of life. Raises EngineFault when a log-prob is missing or not finite.
        """
        engine = self._llm.llm_engine
        waiting = {self._add(request, sampling): request for request in requests}
        done: list[Group] = []
        seen: dict[str, int] = {}
        tokens, last = 0, time.monotonic()
        try:
            while waiting:
                for output in engine.step():
                    if output.finished:
                        group = self._group(waiting.pop(output.request_id), output)
                        tokens += len(group.token_ids)
                        done.append(group)
                if time.monotonic() - last >= tick:
                    yield done, max(tokens, self._look(seen))
                    done, last = [], time.monotonic()
            yield done, tokens
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def _look(self, seen: dict[str, int]) -> int:
        """Tokens of all responses begun so far, finished or not: progress is seen long before a group is whole.

        `seen` keeps the count of every response, so that the sum never falls when one ends before its group does.
        """
        for name, state in self._llm.llm_engine.output_processor.request_states.items():
            if state.detokenizer is not None:
                seen[name] = state.detokenizer.num_output_tokens()
        return sum(seen.values())

    def begin_load(self) -> None:
        """Start taking new weights (vLLM's update API: start).

        A sync that another engine's death cut short is closed first: all tensors come again.
        """
        if self._loading:
            self._rpc("finish_weight_update")
        self._rpc("start_weight_update")
        self._loading = True

    def load_bucket(self, bucket: WeightBucket) -> int:
        """Take some tensors; returns how many."""
        return self._update({"bucket": bucket}, bucket.names)

    def load_shared(self, bucket: SharedBucket) -> int:
        """Take some tensors out of the memory of the learner on the same device; returns how many."""
        return self._update({"shared": bucket}, bucket.names)

    def open_channel(self, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        """Join a broadcast group as ranks `rank ..` (one per device)."""
        channel = {"host": host, "port": port, "first_rank": rank, "size": size, "timeout": timeout}
        self._rpc("init_weight_transfer_engine", channel)

    def receive_bucket(self, names: list[str], shapes: list[tuple[int, ...]], dtype: str) -> int:
        """Take some tensors by broadcast; returns how many."""
        return self._update({"names": tuple(names), "shapes": tuple(shapes), "dtype": dtype}, names)

    def close_channel(self) -> None:
        """Leave the broadcast group."""
        self._rpc("shutdown_weight_transfer_engine")

    def finish_load(self, version: int, probe: Probe) -> Receipt:
        """Finish taking weights, empty the prefix cache, and prove what is now held, on all devices of the engine."""
        started = time.monotonic()
        self._rpc("finish_weight_update")
        self._loading = False
        if self.settings.lora_rank:
            self._rpc("place_adapter")
        reset = bool(self._llm.reset_prefix_cache())
        digests = self._rpc("read_back", dict(probe.columns))
        self.version = version
        return Receipt(self.settings.index, version, digests, reset, time.monotonic() - started)

    def sleep(self) -> None:
        """Give up the device's memory. Weights are thrown away, not copied to the host: a whole sync always follows.

        With LoRA the frozen weights never come again, so then they are kept in host memory.
        """
        self._llm.sleep(level=1 if self.settings.lora_rank else 2)

    def wake(self, what: str) -> None:
        """Take memory back for `weights` (then they must be loaded) or for the `kv_cache`."""
        self._llm.wake_up(tags=[what])

    def _update(self, arrival: dict[str, Any], names: Sequence[str]) -> int:
        try:
            self._rpc("update_weights", arrival)
        except BaseException:
            self._loading = False  # vLLM ends the update itself where loading raises
            raise
        return len(names)

    def _rpc(self, method: str, *args: Any) -> Any:
        """Call a method on every device of the engine; the first one's answer (`read_back` gathers before)."""
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
        for response in responses:
            if response.finish_reason not in ("stop", "length"):  # a fragment is no response, and no long one either
                raise EngineFault(
                    f"engine {self.settings.index}: row {request.prompt.row_id} response {response.index} was broken "
                    f"off ({response.finish_reason})",
                    request.key,
                )
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
            raise EngineFault(
                f"engine {self.settings.index}: log-probs are missing for row {request.prompt.row_id}", request.key
            )
        values = np.asarray(flat.logprobs, dtype=np.float32)
        if not np.isfinite(values).all() or (values > 1e-3).any():
            raise EngineFault(
                f"engine {self.settings.index}: row {request.prompt.row_id} response {response.index} has a log-prob "
                f"that is not finite or above 0 ({values.min()} to {values.max()})",
                request.key,
            )
        return values

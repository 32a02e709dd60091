"""The built-in sampler against `generate`, on a randomly initialised Llama of the SmolLM2-135M shape.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py --device cpu       ragged lengths, fp32, one thread: CPU-time ratio
    python benchmarks/sampler.py --device cuda                        64 slots, 64 + 256 tokens, bf16: tokens per second

Writes benchmarks/results/sampler-DEVICE.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.models.fused_layers import fuse_layers, kernels_on
from opd.models.language_model import LanguageModel
from opd.records import SampledToken, SampleRequest, Sampling

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 49152
H200_BYTES_PER_SECOND = 4.3e12  # achieved by large copies


def build(device: str, dtype: torch.dtype, layers: int) -> tuple[LanguageModel, Any]:
    """The model behind our attention, and the stock one for `generate`, with the same weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = LlamaForCausalLM(config).to(device, dtype).eval()
    stock.set_attn_implementation("sdpa")
    module = LlamaForCausalLM(copy.deepcopy(config)).to(device, dtype)  # our attention is switched on in the config
    module.load_state_dict(stock.state_dict())
    module.set_attn_implementation("sdpa")
    if kernels_on(device):
        fuse_layers(module)  # as a model that is loaded
    names = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    return LanguageModel(module, PreTrainedTokenizerFast(tokenizer_object=names), "smol-shape"), stock


def make_requests(prompts: list[int], new: list[int]) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    return [
        SampleRequest(
            str(i), rng.integers(1, VOCABULARY, p).astype(np.int32), request_key(0, str(i), 0, 0), Sampling(n)
        )
        for i, (p, n) in enumerate(zip(prompts, new, strict=True))
    ]


def generate(stock: Any, batch: list[SampleRequest], new: int) -> None:
    """Left-padded, as long as the longest: what a trainer without continuous batching does."""
    width = max(request.prompt_ids.size for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - request.prompt_ids.size :] = torch.from_numpy(request.prompt_ids)
        mask[row, width - request.prompt_ids.size :] = 1
    ids, mask = ids.to(stock.device), mask.to(stock.device)
    with torch.inference_mode():
        out = stock.generate(ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=True, top_k=0)
    assert out.shape == (len(batch), width + new)


# CPU


def long_tailed(count: int, longest: int) -> list[int]:
    """Exponential quantiles with a mean of a quarter of the longest, in random order."""
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.minimum(longest, np.ceil(-longest / 4 * np.log1p(-quantiles))).astype(int)
    return np.random.default_rng(1).permutation(lengths).tolist()


def cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Six batches of `generate` alternate with sixths of the sampler's work, so that both meet the same noise."""
    torch.set_num_threads(1)
    model, stock = build("cpu", torch.float32, args.layers)
    count, slots = args.requests, args.slots or 16
    new = long_tailed(count, args.new_tokens)
    prompts = np.random.default_rng(2).integers(8, 41, count).tolist()
    requests = make_requests(prompts, new)
    spec = BuiltInSampler(slots=slots, prefill_rows=args.rows, prefill_chunk=args.chunk)
    engine = Engine(model, spec, 48 + args.new_tokens, merge_stop=(1, 2))
    batches = [requests[i : i + slots] for i in range(0, count, slots)]
    generate(stock, batches[0][:2], 2)
    events = engine.sample(requests)
    share, ours, theirs = sum(new) / len(batches), 0.0, 0.0
    for index, batch in enumerate(batches):
        start = time.process_time()
        wanted = math.ceil(share) if index + 1 < len(batches) else sum(new)  # the last share runs to the end
        taken = take(events, wanted)
        middle = time.process_time()
        generate(stock, batch, max(request.sampling.max_new_tokens for request in batch))
        ours, theirs = ours + middle - start, theirs + time.process_time() - middle
        print(
            f"batch {index + 1}: {taken} tokens; sampler {ours:.1f} s, generate {theirs:.1f} s of CPU so far",
            flush=True,
        )
    waste = sum(len(batch) * max(r.sampling.max_new_tokens for r in batch) for batch in batches) / sum(new)
    return {
        "shape": f"{args.layers} layers of SmolLM2-135M, fp32, one thread",
        "requests": count, "settings": vars(engine.settings), "new_tokens": sum(new), "longest": max(new),
        "sampler_cpu_s": round(ours, 2), "generate_cpu_s": round(theirs, 2), "ratio": round(theirs / ours, 2),
        "generate_steps_per_useful_token": round(waste, 2),
        "decode_steps": engine.decode_steps, "prefill_calls": engine.prefill_calls,
    }  # fmt: skip


def take(events: Iterator[Any], wanted: int) -> int:
    taken = 0
    for event in events:
        taken += isinstance(event, SampledToken)
        if taken == wanted:
            break
    return taken


# CUDA


def cuda(args: argparse.Namespace) -> dict[str, Any]:
    model, stock = build("cuda", torch.bfloat16, args.layers)
    slots, prompt, new = args.slots or 64, 64, args.new_tokens
    requests = make_requests([prompt] * slots, [new] * slots)
    numbers: dict[str, Any] = {
        "shape": f"{args.layers} layers of SmolLM2-135M, bf16",
        "work": f"{slots} requests, {prompt} prompt + {new} new tokens, prefill included",
    }
    with_compile = (False,) if args.no_compile else (False, True)
    for compiled in with_compile:
        name = "compiled" if compiled else "graphs"
        numbers[name] = run_engine(model, requests, slots, prompt + new, compiled)
        gc.collect()  # the engine and its graphs
        torch.cuda.empty_cache()
        print(name, json.dumps(numbers[name]), flush=True)
        save("cuda", numbers)
    generate(stock, requests, 4)
    torch.cuda.synchronize()
    start = time.perf_counter()
    generate(stock, requests, new)
    torch.cuda.synchronize()
    numbers["generate_tokens_per_s"] = round(slots * new / (time.perf_counter() - start))
    config = stock.config
    weights = sum(parameter.nbytes for parameter in stock.parameters())
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    kv = slots * (prompt + new / 2) * token_bytes
    floor = (weights + kv) / H200_BYTES_PER_SECOND
    numbers["floor"] = {
        "weight_bytes": weights, "mean_kv_bytes": round(kv), "step_ms": round(floor * 1e3, 3), "tokens_per_s": round(slots / floor),
    }  # fmt: skip
    return numbers


def run_engine(
    model: LanguageModel, requests: list[SampleRequest], slots: int, length: int, compiled: bool
) -> dict[str, Any]:
    start = time.perf_counter()
    engine = Engine(model, BuiltInSampler(slots=slots, compile=compiled), length, merge_stop=(1, 2))
    first = list(engine.sample(requests))
    torch.cuda.synchronize()
    first_seconds, seconds = time.perf_counter() - start, []
    for _ in range(3):
        start = time.perf_counter()
        events = list(engine.sample(requests))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = sum(isinstance(event, SampledToken) for event in events)
    assert engine.steps.calls is not None
    return {
        "settings": vars(engine.settings), "tokens": tokens, "repeats_exactly": events == first, "seconds": [round(s, 4) for s in seconds],
        "tokens_per_s": round(tokens / statistics.median(seconds)),
        "decode_step_ms": round(device_ms(lambda: engine.steps.decode(length - 1, False)), 3),
        "prefill_call_ms": round(device_ms(lambda: engine.steps.prefill([])), 3),
        "first_run_s": round(first_seconds, 1), "compile_and_capture_s": round(engine.steps.calls.seconds, 1),
        "cache_bytes": engine.steps.cache.bytes,
    }  # fmt: skip


def device_ms(call: Any, repeats: int = 50) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def save(device: str, numbers: dict[str, Any]) -> Path:
    machine = platform.machine()
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
        machine = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), machine)
    record = {
        "machine": machine, "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "command": f"python {' '.join(sys.argv)}", **numbers,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"sampler-{device}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--requests", type=int, default=96, help="CPU")
    parser.add_argument("--new-tokens", type=int, help="longest response; default 128 on the CPU, 256 on CUDA")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--rows", type=int, help="CPU: prefill rows")
    parser.add_argument("--chunk", type=int, help="CPU: prefill chunk")
    parser.add_argument("--no-compile", action="store_true", help="CUDA: leave the compiled run out")
    args = parser.parse_args()
    args.new_tokens = args.new_tokens or {"cpu": 128, "cuda": 256}[args.device]
    numbers = {"cpu": cpu, "cuda": cuda}[args.device](args)
    path = save(args.device, numbers)
    print(path.read_text())


if __name__ == "__main__":
    main()

"""On-policy distillation through the Tinker API, in its four moves, against a server of your own.

export TINKER_API_KEY=tml-something
opd serve tiny/generalist tiny/arithmetic --tinker --token-env TINKER_API_KEY
TINKER_BASE_URL=http://127.0.0.1:8200 python examples/tinker_opd.py
"""

from __future__ import annotations

import random

import numpy as np
import tinker
from tinker import types

STEPS, PROMPTS, SAMPLES = 20, 32, 4


def question() -> str:
    """A prompt of the task `addition`, in the chat template of the tiny models."""
    return f"add {random.randint(10, 99)}+{random.randint(10, 99)}="


def main() -> None:
    random.seed(0)
    service = tinker.ServiceClient()
    student = service.create_lora_training_client("tiny/generalist", rank=16, seed=0)
    teacher = service.create_sampling_client(base_model="tiny/arithmetic")  # 1. a sampling client for the teacher
    tokenizer = student.get_tokenizer()
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    for step in range(STEPS):
        sampler = student.save_weights_and_get_sampling_client()
        prompts = [tokenizer.encode(question()) for _ in range(PROMPTS)]
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        # 2. trajectories of the student
        written = [
            (prompt, each) for prompt, found in zip(prompts, asked, strict=True) for each in found.result().sequences
        ]
        texts = [prompt + list(sequence.tokens) for prompt, sequence in written]
        # 3. the teacher's log-probs of them
        scores = [teacher.compute_logprobs(types.ModelInput.from_ints(ids)) for ids in texts]
        data, kl = [], []
        for ids, (prompt, sequence), score in zip(texts, written, scores, strict=True):
            before = [0.0] * (len(prompt) - 1)
            own, theirs = np.array(sequence.logprobs), np.array(score.result()[len(prompt) :], dtype=np.float64)
            advantages = theirs - own  # 4. the negative reverse KL, one sample per token
            kl += (-advantages).tolist()
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": before + own.tolist(),
                "advantages": before + advantages.tolist(),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        trained = student.forward_backward(data, "importance_sampling")
        student.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        trained.result()
        print(f"step {step + 1}: KL to the teacher {np.mean(kl):.3f} nats per token", flush=True)
    print("saved at", student.save_state("distilled").result().path)


if __name__ == "__main__":
    main()

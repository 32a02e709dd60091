"""The pieces without the trainer: the student samples, the teacher scores, one exact divergence, one update."""

import torch

import opd
from opd.divergences import divergence
from opd.sampling.collect import collect, make_requests
from opd.sampling.engine import Engine
from opd.sampling.samplers import BuiltInSampler
from opd.types import Sampling

student, teacher = opd.load_model("tiny/generalist"), opd.load_model("tiny/arithmetic")
stop = student.stop_ids
engine = Engine(student.inference_copy(), BuiltInSampler(), max_length=64, merge_stop=stop)  # shares the weights
optimiser = torch.optim.AdamW(student.module.parameters(), lr=2e-4)
for step in range(30):
    prompts = opd.prompts("task:addition", 64, start=64 * step)
    rollouts = collect(engine, make_requests(prompts, student.tokenizer, Sampling(16, stop_ids=stop), seed=0))
    batch = opd.Pack.of(rollouts)  # back to back, no padding
    with torch.no_grad():
        target = teacher.predict(batch)  # of every response token; row t - 1 predicts token t
    found = divergence("reverse_kl", student.predict(batch), target, merge=(stop,))
    (found.loss / len(found.value)).backward()
    optimiser.step()
    optimiser.zero_grad()
    print(step, f"reverse KL {found.value.mean():.4f} nats per token")

"""The pieces without the trainer: the student samples, the teacher scores, one exact divergence, one update."""

import torch

from opd.config import PromptSource, SamplerSpec
from opd.data.sources import open_source
from opd.divergence import divergence
from opd.models import load_model
from opd.models.packing import Pack
from opd.rollout.collect import collect, make_requests
from opd.rollout.engine import Engine
from opd.types import Sampling

student, teacher = load_model("tiny/generalist"), load_model("tiny/arithmetic")
source, stop = open_source(PromptSource(source="task:addition")), student.stop_ids
engine = Engine(student.inference_copy(), SamplerSpec(), max_length=64, merge_stop=stop)  # shares the weights
optimiser = torch.optim.AdamW(student.module.parameters(), lr=2e-4)
for step in range(30):
    prompts = [source.train(64 * step + index) for index in range(64)]
    rollouts = collect(engine, make_requests(prompts, student.tokenizer, Sampling(16, stop_ids=stop), seed=0))
    batch = Pack.of(rollouts)  # back to back, no padding; row t - 1 predicts token t
    with torch.no_grad():
        judged = teacher.hidden(batch.ids_T, batch.layout)[batch.predicting_N]
    hidden = student.hidden(batch.ids_T, batch.layout)[batch.predicting_N]
    found = divergence("reverse_kl", student.project(hidden), teacher.project(judged), merge=(stop,))
    (found.loss / len(hidden)).backward()
    optimiser.step()
    optimiser.zero_grad()
    print(step, f"reverse KL {found.value.mean():.4f} nats per token")

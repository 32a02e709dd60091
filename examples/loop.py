"""The pieces without a run: the student samples, the teacher scores every token, one exact divergence, one update."""

import torch

import opd

student = opd.load_model("tiny/generalist")
teacher = opd.Teacher("tiny/arithmetic", student)  # same tokenizer; all their stop ids are one event
sampler = opd.Sampler(student, max_new_tokens=16)  # shares the student's weights
optimiser = torch.optim.AdamW(student.module.parameters(), lr=2e-4)
for step in range(30):
    rollouts = sampler.sample(opd.prompts("task:addition", 64, start=64 * step))
    batch = opd.Pack.of(rollouts, student.device)  # back to back, no padding
    found = opd.divergence("reverse_kl", student.predict(batch), teacher.predict(batch), merge=[student.stop_ids])
    (found.loss / len(found.value)).backward()  # row t - 1 predicts token t: `predict` sees to that
    optimiser.step()
    optimiser.zero_grad()
    print(step, f"reverse KL {found.value.mean():.4f} nats per token")

"""The objective of every method as a few lines of fp64, on the same tokens: the loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.divergences.compute import gathered_loss, likeliest_events
from opd.divergences.projection import Projection, merge_events
from opd.models.language_model import LanguageModel, Pack
from opd.objective.gates import keyed_uniforms
from opd.objective.policy_gradient import TRRD
from opd.objective.term import candidate_losses
from opd.recipe import load_recipe, shipped_recipes
from opd.records import Author, Rollout
from tests.support.helpers import tiny_module, tiny_tokenizer
from tests.support.rollouts import STOPS, sampled_by, some_rollouts
from tests.support.steps import gradients

REWARDS = {"r0": 1.0, "r1": 0.0, "r2": 0.0, "r3": 0.0, "r4": 1.0, "r5": 0.0, "r6": 1.0}


@dataclass(eq=False)
class Answer:
    """One rollout: logits of both sides (T, V), of which the student's have gradients."""

    rollout: Rollout
    student: Tensor
    teacher: Tensor
    outcome: float = 0.0  # GRPO's advantage, divided by the group's standard deviation
    centred: float = 0.0  # the reward minus the group's mean

    @cached_property
    def log_s(self) -> Tensor:
        return self.student.log_softmax(-1)

    @cached_property
    def log_t(self) -> Tensor:
        return self.teacher.log_softmax(-1)

    @property
    def y(self) -> Tensor:
        return torch.from_numpy(self.rollout.response_ids.astype(np.int64))

    def at(self, logprobs: Tensor) -> Tensor:
        return logprobs.gather(-1, self.y[:, None])[:, 0]

    @property
    def s(self) -> Tensor:
        return self.at(self.log_s)

    @property
    def t(self) -> Tensor:
        return self.at(self.log_t)

    @property
    def b(self) -> Tensor:
        return torch.from_numpy(self.rollout.logprob.astype(np.float64))

    @property
    def forward_kl(self) -> Tensor:
        return (self.log_t.exp() * (self.log_t - self.log_s)).sum(-1)

    @property
    def reverse_kl(self) -> Tensor:
        return (self.log_s.exp() * (self.log_s - self.log_t)).sum(-1)

    @property
    def teacher_entropy(self) -> Tensor:
        return -(self.log_t.exp() * self.log_t).sum(-1)

    def draws(self, name: str) -> Tensor:
        return torch.from_numpy(keyed_uniforms(f"0/{name}/{self.rollout.id}", self.rollout.response_ids.size))

    @property
    def accepted(self) -> Tensor:
        return (self.draws("accept") < (self.t - self.b).exp()).double()


Answers = list[Answer]


def ppo(log_ratio: Tensor, advantage: Tensor | float, low: float, high: float, dual: float | None = None) -> Tensor:
    ratio, advantage = log_ratio.exp(), torch.as_tensor(advantage, dtype=torch.float64)
    losses = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    return losses if dual is None else torch.where(advantage < 0, torch.minimum(losses, -dual * advantage), losses)


def mean(
    answers: Answers, losses: Callable[[Answer], Tensor], weigh: Callable[[Answer], Tensor] | None = None
) -> Tensor:
    """Over the tokens with a weight, or over all if the weights are given with the losses."""
    total = torch.cat([losses(item) * (1.0 if weigh is None else weigh(item)) for item in answers]).sum()
    counts = [item.y.numel() if weigh is None else int((weigh(item) != 0).sum()) for item in answers]
    return total / max(sum(counts), 1)


def right(item: Answer) -> Tensor:
    return torch.full_like(item.b, REWARDS[item.rollout.id])


def wrong(item: Answer) -> Tensor:
    return 1 - right(item)


def eopd(answers: Answers) -> Tensor:
    def forward(item: Answer) -> Tensor:
        top = item.log_t.topk(16)
        kept = top.values.log_softmax(-1)
        found = (kept.exp() * (kept - item.log_s.gather(-1, top.indices))).sum(-1)
        return found * (item.teacher_entropy > 0.8)

    return mean(answers, lambda item: ppo(item.s - item.b, item.t - item.b, 0.2, 0.2) + forward(item))


def revisiting(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        found = []
        for row, y in enumerate(item.y):
            ids = sorted({*item.log_t[row].topk(32).indices.tolist(), int(y)})
            log_s, log_t = item.log_s[row, ids].log_softmax(-1), item.log_t[row, ids].log_softmax(-1)
            found.append((log_s.exp() * (log_s - log_t)).sum())
        return torch.stack(found)

    def unsure(item: Answer) -> Tensor:
        entropy = -(item.log_s.exp() * item.log_s).sum(-1).detach()
        open_ = torch.ones_like(entropy)
        first = [n for n, y in enumerate(item.y) if y == 2][:1]
        open_[first] = 0.0
        count = round(0.2 * int(open_.sum()))
        kept = torch.zeros_like(entropy)
        kept[entropy.masked_fill(open_ == 0, -1).argsort(descending=True, stable=True)[:count]] = 1.0
        return kept

    return mean(answers, losses, unsure)


def tropd(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        top = item.log_t.topk(16)
        forward = (top.values.exp() * (top.values - item.log_s.gather(-1, top.indices))).sum(-1)
        return item.accepted * -(item.s - item.b).exp() * (item.t - item.b) + (1 - item.accepted) * forward

    return mean(answers, losses)


def several_draws(item: Answer) -> Tensor:
    rate = torch.minimum(item.log_s.exp(), item.log_t.exp()).sum(-1).detach()
    further = item.draws("more/accept") < 1 - (1 - rate) ** 4
    return torch.where((item.accepted > 0) | further, 1.0, 0.01)


def drift(item: Answer) -> Tensor:
    gap = (item.t - item.b).abs()
    return 1 + 0.5 * (1 - (gap.cumsum(0) - gap) / gap.sum())


def top_d(answers: Answers) -> Tensor:
    returns = {}
    for item in answers:
        r = (0.5 * (item.t - item.b).exp() + 0.5).log().detach()
        later = [r[k + 1 :].mean() if k + 1 < r.numel() else torch.zeros(()) for k in range(r.numel())]
        returns[item.rollout.id] = r + torch.stack(later).double()
    for group in {item.rollout.group for item in answers}:
        names = [item.rollout.id for item in answers if item.rollout.group == group]
        every = torch.cat([returns[name] for name in names])
        for name in names:
            spread = every.std(correction=0) + 1e-8 * 2  # r of the recipe is half of this one
            returns[name] = (returns[name] - every.mean()) / spread if every.numel() > 1 else torch.zeros(1)
    return mean(answers, lambda item: ppo(item.s - item.b, returns[item.rollout.id], 0.2, 0.2))


def rlad(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        log_ratio = 0.5 * (item.s - item.b) + 0.5 * (item.s - item.t).clamp(-1, 1)
        return ppo(log_ratio, item.outcome, 0.2, 0.28)

    return mean(answers, losses)


def kdrl_mask(answers: Answers) -> Tensor:
    return mean(
        answers,
        lambda item: (
            ppo(item.s - item.b, item.outcome, 0.2, 0.2)
            + 0.2 * wrong(item) * ppo(item.s - item.b, item.t - item.b, 0.2, 0.2)
        ),
    )


def srpo(answers: Answers) -> Tensor:
    return mean(
        answers,
        lambda item: (
            right(item) * ppo(item.s - item.b, item.outcome, 0.2, 0.2)
            + wrong(item) * ppo(item.s - item.b, item.t - item.b, 0.2, 0.2)
        ),
    )


def rethinking(answers: Answers) -> Tensor:
    """With one update the ratios are 1: the loss is minus the sum of advantages, and only its gradient matters."""

    def losses(item: Answer) -> Tensor:
        top = item.log_s.detach().topk(16)
        now, old, t = item.log_s.gather(-1, top.indices), top.values, item.log_t.gather(-1, top.indices)
        return -((now - old).exp() * old.softmax(-1) * (t - old)).sum(-1)

    return mean(answers, losses)


def hpd(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        s, t = item.log_s.detach(), item.log_t
        found = []
        for row, (y, u) in enumerate(zip(item.y.tolist(), item.draws("hpd"), strict=True)):
            z = int((s[row].exp().cumsum(-1) <= u * s[row].exp().sum()).sum())
            k = s[row].exp() * (t[row] - s[row])
            a = k[y]
            if k[y] > 0:
                a = a + t[row, y].exp() * (2 if k[z] < 0 else 1)
            other = k[z].clamp(max=0) if z != y else 0.0
            found.append(-a * item.log_s[row, y] - other * item.log_s[row, z])
        return torch.stack(found)

    return mean(answers, losses)


def ketchup(answers: Answers) -> Tensor:
    returns = {}
    for item in answers:
        chosen, best, size = item.at(item.teacher), item.teacher.amax(-1), item.y.numel()
        rewards = [chosen[start] - (best[start + 4] if start + 4 < size else 0.0) for start in range(0, size, 4)]
        returns[item.rollout.id] = torch.stack([sum(rewards[t // 4 :], torch.zeros(())) for t in range(size)])
    every = torch.cat(list(returns.values()))
    scale = every.std(correction=0) + 1e-8
    return mean(answers, lambda item: -(item.s - item.b).exp() * (returns[item.rollout.id] - every.mean()) / scale)


def dr_grpo(answers: Answers) -> Tensor:
    return sum((ppo(item.s - item.b, item.centred, 0.2, 0.2).sum() for item in answers), torch.zeros(())) / 4096


def gspo(answers: Answers) -> Tensor:
    """With one update the ratio to the policy before it is 1, and its gradient that of each token's own log-prob."""
    means = [(-(item.s - item.s.detach()).exp() * item.outcome).mean() for item in answers]
    return torch.stack(means).mean()


def cispo(answers: Answers) -> Tensor:
    return mean(answers, lambda item: -(item.s - item.b).exp().detach().clamp(0, 4) * item.outcome * item.s)


def roc(answers: Answers) -> Tensor:
    """Of the groups with contrast here both answers stay: at least two of each kind, and there is one."""
    kept = {"r0", "r1", "r4", "r5"}
    chosen = [item for item in answers if item.rollout.id in kept]
    return mean(chosen, lambda item: ppo(item.s - item.b, item.outcome, 0.2, 0.28))


def unlikely(answers: Answers) -> dict[str, Tensor]:
    """The fifth of the tokens with the lowest log-prob."""
    every = torch.cat([item.b for item in answers])
    limit = every.sort().values[round(0.2 * every.numel()) - 1]
    return {item.rollout.id: (item.b <= limit).double() for item in answers}


def opsa(answers: Answers) -> Tensor:
    open_ = unlikely(answers)
    entropy = {item.rollout.id: -(item.log_s.exp() * item.log_s).sum(-1).detach() for item in answers}
    trained = torch.cat([entropy[name][mask > 0] for name, mask in open_.items()])
    low, width = trained.min(), trained.max() - trained.min()

    def losses(item: Answer) -> Tensor:
        advantage = -0.5 - (entropy[item.rollout.id] - low) / (2 * width)
        return -(item.s - item.b).exp() * advantage

    return mean(answers, losses, lambda item: open_[item.rollout.id])


def fixed(answers: Answers) -> Tensor:
    open_ = unlikely(answers)
    return mean(answers, lambda item: 0.5 * (item.s - item.b).exp(), lambda item: open_[item.rollout.id])


def of_answers(answers: Answers, losses: Callable[[Answer], Tensor]) -> Tensor:
    """The mean over answers of the mean over their tokens."""
    return torch.stack([losses(item).mean() for item in answers]).mean()


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """Of log-distributions: half the KLs to their mean."""
    m = (0.5 * p.exp() + 0.5 * q.exp()).log()
    return 0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)


def with_tail(item: Answer, k: int) -> tuple[Tensor, Tensor]:
    """Both sides on the student's k likeliest events and one for all others."""
    ids = item.log_s.detach().topk(k).indices
    known = [side.gather(-1, ids) for side in (item.log_s, item.log_t)]
    log_s, log_t = (torch.cat([some, (1 - some.exp().sum(-1, keepdim=True)).log()], -1) for some in known)
    return log_s, log_t


def opcd(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        log_s, log_t = with_tail(item, 32)
        return (log_s.exp() * (log_s - log_t)).sum(-1)

    return mean(answers, losses)


def corrected(item: Answer, weight: Callable[[Tensor], Tensor], advantage: Tensor | float) -> Tensor:
    """Importance sampling with a weight of the ratio of trainer to sampler in place of that ratio."""
    rho = (item.s - item.b).exp().detach()
    return -weight(rho) * (item.s - item.s.detach()).exp() * advantage


def band(rho: Tensor) -> Tensor:
    return rho * ((rho >= 0.5) & (rho <= 2.0))


def gap(item: Answer) -> Tensor:
    return item.t - item.s.detach()


def glm5(answers: Answers) -> Tensor:
    return of_answers(
        answers,
        lambda item: band((item.s - item.b).exp().detach()) * ppo(item.s - item.s.detach(), gap(item), 0.2, 0.28),
    )


def kepo(answers: Answers) -> Tensor:
    chosen = [item for item in answers if REWARDS[item.rollout.id] == 1]
    policy = of_answers(answers, lambda item: ppo(item.s - item.s.detach(), item.outcome, 0.2, 0.2))
    return policy + of_answers(chosen, lambda item: jsd(item.log_s, item.log_t))


def scope(answers: Answers) -> Tensor:
    def perplexities(items: Answers, of: Callable[[Answer], Tensor], power: float) -> dict[str, float]:
        raw = {item.rollout.id: float((-power * of(item).mean()).exp()) for item in items}
        groups = {
            item.rollout.id: [raw[one.rollout.id] for one in items if one.rollout.group == item.rollout.group]
            for item in items
        }
        return {name: raw[name] / float(np.mean(groups[name])) for name in raw}

    good = [item for item in answers if REWARDS[item.rollout.id] == 1]
    bad = [item for item in answers if REWARDS[item.rollout.id] == 0]
    own, theirs = perplexities(good, lambda item: item.b, 1.0), perplexities(bad, lambda item: item.t, -1.0)
    return mean(good, lambda item: -own[item.rollout.id] * item.s) + mean(
        bad, lambda item: theirs[item.rollout.id] * ppo(item.s - item.b, item.t - item.b, 0.2, 0.2)
    )


def paced(answers: Answers) -> Tensor:
    def weight(item: Answer) -> float:
        passed = [REWARDS[one.rollout.id] for one in answers if one.rollout.group == item.rollout.group]
        return float(np.mean(passed) * (1 - np.mean(passed)))

    return of_answers(answers, lambda item: weight(item) * item.forward_kl)


def tip(answers: Answers) -> Tensor:
    every = torch.cat([-(item.log_s.exp() * item.log_s).sum(-1).detach() for item in answers])
    far = torch.cat([item.reverse_kl.detach() for item in answers])
    h, d = ((value - value.min()) / (value.max() - value.min()) for value in (every, far))
    score = h + d - h * d
    limit = score.sort(descending=True).values[round(0.5 * score.numel()) - 1]
    open_ = dict(
        zip(
            [item.rollout.id for item in answers],
            (score >= limit).double().split([item.y.numel() for item in answers]),
            strict=True,
        )
    )
    return mean(answers, lambda item: item.reverse_kl, lambda item: open_[item.rollout.id])


def selectkd(answers: Answers) -> Tensor:
    def accepted(item: Answer) -> Tensor:
        best, top = item.log_s.argmax(-1), item.log_t.topk(5).indices
        return torch.where((top == best[:, None]).any(-1), 1.0, 0.01)

    return mean(answers, lambda item: item.reverse_kl, accepted)


def sdpo(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        log_rho = (item.s - item.b).detach()
        prefix = (log_rho.cumsum(0) - log_rho).exp().clamp(max=2.0)
        return prefix * jsd(*with_tail(item, 32))

    return mean(answers, losses)


def sd_zero(answers: Answers) -> Tensor:
    def losses(item: Answer) -> Tensor:
        ids = item.log_t.topk(64).indices
        log_s, log_t = (side.gather(-1, ids).log_softmax(-1) for side in (item.log_s, item.log_t))
        return 0.5 * (log_t.exp() * (log_t - log_s)).sum(-1) + 0.5 * (log_s.exp() * (log_s - log_t)).sum(-1)

    return mean(answers, losses)


def multi_turn_mopd(answers: Answers) -> Tensor:
    def weight(rho: Tensor) -> Tensor:
        return rho * ((rho >= 0.2) & (rho <= 5.0))

    return mean(answers, lambda item: corrected(item, weight, (item.t - item.b).clamp(-20, 20)))


def kdrl(answers: Answers) -> Tensor:
    return mean(
        answers,
        lambda item: ppo(item.s - item.b, item.outcome, 0.2, 0.2) + 0.005 * wrong(item) * 0.5 * (item.s - item.t) ** 2,
    )


METHODS: dict[str, Callable[[Answers], Tensor]] = {
    "opd": lambda answers: mean(answers, lambda item: item.reverse_kl),
    "gkd": lambda answers: mean(answers, lambda item: jsd(item.log_s, item.log_t)),
    "opsd": lambda answers: mean(answers, lambda item: jsd((item.log_s / 1.1).log_softmax(-1), (item.log_t / 1.1).log_softmax(-1))),
    "ema": lambda answers: mean(answers, lambda item: jsd(*with_tail(item, 32))),
    "opcd": opcd,
    "paced-prompts": lambda answers: of_answers(answers, lambda item: item.forward_kl),
    "opsdl": lambda answers: mean(answers, lambda item: -(item.s - item.b).exp() * (item.t - item.b)),
    "thinking-machines": lambda answers: sum((-(item.s - item.b).exp() * (item.t - item.b)).sum() for item in answers),
    "icepop": lambda answers: mean(answers, lambda item: corrected(item, band, gap(item))),
    "mimo-objective": lambda answers: of_answers(answers, lambda item: corrected(item, band, gap(item) + 0.5 * item.outcome)),
    "lightning": lambda answers: of_answers(answers, lambda item: -(item.s - item.s.detach()).exp() * gap(item)),
    "glm5-objective": glm5,
    "grpo": lambda answers: mean(answers, lambda item: ppo(item.s - item.b, item.outcome, 0.2, 0.28)),
    "partial-rollouts": lambda answers: mean(answers, lambda item: corrected(item, lambda rho: rho.clamp(max=2), item.centred)),
    "kdrl": kdrl,
    "kepo": kepo,
    "sdpo": sdpo,
    "sd-zero": sd_zero,
    "multi-turn-mopd": multi_turn_mopd,
    "sft": lambda answers: mean(answers, lambda item: -item.s),
    "scope": scope,
    "paced": paced,
    "tip": tip,
    "selectkd": selectkd,
    "eopd": eopd,
    "revisiting": revisiting,
    "osd": lambda answers: mean(answers, lambda item: item.forward_kl, lambda item: 1 - item.accepted),
    "speckd": lambda answers: mean(answers, lambda item: item.forward_kl, lambda item: item.accepted),
    "selectkd-draws": lambda answers: mean(answers, lambda item: item.reverse_kl, several_draws),
    "trust": lambda answers: mean(answers, lambda item: item.reverse_kl * (-item.teacher_entropy).exp()),
    "iw-opd": lambda answers: mean(answers, lambda item: drift(item) * ppo(item.s - item.b, item.t - item.b, 0.2, 0.2, 3.0)),
    "tropd": tropd,
    "top-d": top_d,
    "rlad": rlad,
    "kdrl-mask": kdrl_mask,
    "srpo": srpo,
    "rethinking-opd": rethinking,
    "hpd": hpd,
    "ketchup": ketchup,
    "rstar2": roc,
    "dr-grpo": dr_grpo,
    "dapo": lambda answers: mean(answers, lambda item: ppo(item.s - item.b, item.outcome, 0.2, 0.28)),
    "gspo": gspo,
    "cispo": cispo,
    "opsa": opsa,
    "fixed-advantage": fixed,
}  # fmt: skip


SAME = {  # methods with the objective of another one; they differ in who writes, who scores and what is read
    **dict.fromkeys(("crisp", "curriculum", "sdft", "refresh", "fast-opd", "deepseek-v4-objective", "gemma2", "multi-turn-opd"), "opd"),
    "gkd-schedule": "gkd", "oel": "opcd", "oel-games": "opcd", "tcod": "opsdl", "mopd": "icepop",
}  # fmt: skip
ELSEWHERE = {  # methods that need more than one author and one teacher, and where their formulas, or the parts of them, are checked
    "objective/test_writers_in_groups.py": "luffy bond j-bond distillm-2",
    "objective/test_pairwise.py": "dpo online-dpo orpo-distill spin",
    "objective/test_hidden_states.py": "oprd dskd dskdv2",
    "objective/test_value.py": "ppo llm4teach rpd",
    "objective/test_turns.py": "sod openclaw-rl probing-to-refine",
    "objective/test_magnitude_advantage.py": "rlsd",
    "objective/test_controls.py": "shuffled-teacher",
    "objective/test_policy_gradient.py": "minillm exopd hdpo ovd ovd-cut",
    "objective/test_terms.py": "hard-switch",
    "objective/test_gates.py": "apple-ssd rstar2-tools score",
    "objective/test_formulas.py": "distillm",
    "teachers/test_mixtures.py": "veto aligndistil",
    "loop/test_discriminator.py": "gad rlhf rstar-math",
    "divergences/test_cross_vocabulary.py": "uld gold simct",
}


def objective_of(name: str) -> list[dict[str, object]]:
    return [term.model_dump() for term in load_recipe(f"methods/{name}").stages[-1].objective]


def test_every_method_has_a_reference() -> None:
    for name, other in SAME.items():
        assert objective_of(name) == objective_of(other), name
    listed = [*METHODS, *SAME, *" ".join(ELSEWHERE.values()).split()]
    shipped = [name.removeprefix("methods/") for name in shipped_recipes() if name.startswith("methods/")]
    assert sorted(listed) == sorted(shipped)
    assert all((Path(__file__).parents[1] / file).is_file() for file in ELSEWHERE)


def in_fp64(seed: int) -> LanguageModel:
    return LanguageModel(tiny_module(seed=seed).double(), tiny_tokenizer(), "test/fp64")


def logits(model: LanguageModel, item: Rollout) -> Tensor:
    """(T, V) with all stop ids as one event."""
    pack = Pack.of([item])
    rows = model.project(model.hidden(pack.ids_T, pack.layout)[pack.predicting_N])
    return merge_events(rows.logits(), (STOPS,))


def scored(student: LanguageModel, teacher: LanguageModel, rollouts: list[Rollout]) -> Answers:
    answers = [Answer(item, logits(student, item), logits(teacher, item).detach()) for item in rollouts]
    for answer in answers:
        group = np.array([REWARDS[item.id] for item in rollouts if item.group == answer.rollout.group])
        answer.centred = REWARDS[answer.rollout.id] - float(group.mean())
        answer.outcome = answer.centred / (group.std(ddof=1) + 1e-4 if group.size > 1 else 1.0)
    return answers


def stale(rollouts: list[Rollout]) -> list[Rollout]:
    """As if sampled by a policy that has since moved, so that ratios are not 1."""
    generator = np.random.default_rng(3)
    return [
        replace(item, logprob=(item.logprob + 0.3 * generator.normal(size=item.logprob.size)).astype(np.float32))
        for item in rollouts
    ]


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_and_gradient_of_a_method(name: str) -> None:
    student, teacher = in_fp64(0), in_fp64(1)
    rollouts = stale(sampled_by(student, some_rollouts()))
    if name == "sft":
        rollouts = [replace(item, author=np.full_like(item.author, Author.DATA)) for item in rollouts]
    stage = load_recipe(f"methods/{name}").stages[-1]
    terms = [term.model_dump() for term in stage.objective]
    loss, slopes, _ = gradients(student, {"t": teacher}, terms, rollouts, spec=stage.rollout, scores=REWARDS)
    student.module.zero_grad()
    wanted = METHODS[name](scored(student, teacher, rollouts))
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5, abs=1e-7)
    scale = max(float(value.abs().max()) for value in slopes.values())
    assert scale > 0
    for key, parameter in student.module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(slopes[key], parameter.grad, rtol=0, atol=1e-5 * scale)


def test_candidates_are_clipped_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    old, now, teacher = (torch.randn(5, 4, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(3))
    found = candidate_losses(now, old, teacher, "student", 0.2, 0.2)
    for row in range(5):
        weights = old[row].exp() / old[row].exp().sum()
        total = 0.0
        for v in range(4):
            advantage, ratio = float(weights[v] * (teacher[row, v] - old[row, v])), float((now - old)[row, v].exp())
            total += max(-ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage)
        assert float(found[row]) == pytest.approx(total)


@pytest.mark.filterwarnings("ignore:heads of different sizes")
@pytest.mark.parametrize("weigh", ["student", "teacher", "none"])
def test_candidates_that_the_teacher_does_not_have_teach_nothing(weigh: str) -> None:
    """The student's last two ids are above the teacher's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden, head, theirs = (
        torch.randn(rows, 4, dtype=torch.float64, generator=generator) for rows in (6, 10, 8)
    )  # fmt: skip
    hidden.requires_grad_(True)
    student, teacher = Projection(hidden, head), Projection(hidden.detach(), theirs)
    ids, old = likeliest_events(student.detach(), 10)

    def losses(log_s: Tensor, log_t: Tensor, part: slice) -> Tensor:
        return candidate_losses(log_s, old[part], log_t, weigh, 0.2, 0.2)

    gathered_loss(student, teacher, ids, torch.ones(6), losses).backward()
    log_s, log_t = ((hidden @ side.T)[:, :8].log_softmax(-1) for side in (head, theirs))
    order = ids[ids < 8].reshape(6, 8)
    log_s, log_t = log_s.gather(-1, order), log_t.gather(-1, order).detach()
    before = old[ids < 8].reshape(6, 8)
    shares = {"student": old.softmax(-1)[ids < 8].reshape(6, 8), "teacher": log_t.exp(), "none": torch.ones(())}
    advantage = shares[weigh] * (log_t - before)
    ratio = (log_s - before).exp()
    wanted = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage).sum()
    (expected,) = torch.autograd.grad(wanted, hidden)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected)


def test_trrd_stops_pushing_at_its_bound() -> None:
    """With alpha 0.5 and the weights that drew a token, a good one is left alone once log S - log T > 2 log 1.28, a bad one below 2 log 0.8."""
    surrogate = TRRD(alpha=0.5, high=0.28)
    gaps = torch.linspace(-0.9, 0.9, 181, dtype=torch.float64)
    for advantage, pushed in ((1.0, gaps < 2 * np.log(1.28)), (-1.0, gaps > 2 * np.log(0.8))):
        current = torch.full_like(gaps, -2.0).requires_grad_()
        losses, clipped = surrogate.losses(
            current, current.detach(), torch.full_like(gaps, advantage), torch.zeros_like(gaps), current.detach() - gaps
        )
        (slope,) = torch.autograd.grad(losses.sum(), current)
        assert ((slope != 0) == pushed).all()
        assert (-slope[pushed] * advantage > 0).all()
        assert clipped is not None
        assert (clipped == ~pushed).all()

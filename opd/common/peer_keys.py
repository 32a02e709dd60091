"""Keys of other frameworks and their names here: one table for errors about unknown keys and for docs/coming-from.md.

TRL: its trainers' configs and the `TrainingArguments` below them. verl: dotted paths as Hydra writes them; `NAME` in one is any name.
tinker-cookbook: the configs of its distillation and RL scripts. ms-swift: the arguments of `swift rlhf`. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

ANY = "NAME"  # a part of a dotted key that may be any name
NO_MATCH = (0, False)
MOST = 5  # keys of one mapping that are translated in a message


@dataclass(frozen=True)
class Translation:
    """One row: keys of each framework, separated by spaces, that mean the same thing.

    >>> print(Translation("`train.lr`", trl="learning_rate").sentence(["TRL"], "learning_rate"))
    TRL's `learning_rate` is `train.lr` here
    """

    here: str = ""  # the keys here, in backticks; empty: there is no counterpart
    note: str = ""  # punctuation first: how it is used, and how values differ
    why: str = ""  # there is no counterpart: the reason
    trl: str = ""
    verl: str = ""
    tinker: str = ""
    swift: str = ""

    def keys(self) -> dict[str, list[str]]:
        """Framework -> its keys."""
        found = {"TRL": self.trl, "verl": self.verl, "tinker-cookbook": self.tinker, "ms-swift": self.swift}
        return {framework: text.split() for framework, text in found.items() if text}

    def sentence(self, frameworks: Sequence[str], key: str) -> str:
        *others, last = frameworks
        subject = f"`{key}` of {', '.join(others)} and {last}" if others else f"{last}'s `{key}`"
        return (
            f"{subject} is {self.here} here{self.note}"
            if self.here
            else f"{subject} has no counterpart here: {self.why}"
        )


_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
_OPTIM, _LOSS, _TEACHER = (
    f"{_ACTOR}optim.",
    "distillation.distillation_loss.",
    "distillation.teacher_models.NAME.",
)


def _under(prefix: str, keys: str) -> str:
    return " ".join(prefix + key for key in keys.split())


GLOSSARY: dict[str, tuple[Translation, ...]] = {  # section of the table -> its rows
    "Models": (
        Translation("`student.model`", trl="model_name_or_path model", verl=f"{_MODEL}path", tinker="model_name load_checkpoint_path", swift="model adapters"),
        Translation("`student.revision`", trl="model_revision", swift="model_revision"),
        Translation("`train.precision`", " (there is no fp16)", trl="dtype torch_dtype bf16 fp16", verl=f"{_ACTOR}fsdp_config.model_dtype", swift="torch_dtype bf16 fp16"),
        Translation("`student.lora`", " (without it all weights are trained)", trl="use_peft peft_config", swift="tuner_type train_type"),
        Translation("`student.lora.rank`", trl="lora_r", verl=_under(_MODEL, "lora_rank lora.rank"), tinker="lora_rank", swift="lora_rank"),
        Translation("`student.lora.alpha`", trl="lora_alpha", verl=_under(_MODEL, "lora_alpha lora.alpha"), swift="lora_alpha"),
        Translation("`student.lora.dropout`", trl="lora_dropout", verl=f"{_MODEL}lora.dropout", swift="lora_dropout"),
        Translation("`student.lora.targets`", trl="lora_target_modules", verl=_under(_MODEL, "target_modules lora.target_modules"), swift="target_modules"),
        Translation("`student.gradient_checkpointing`", trl="gradient_checkpointing", verl=f"{_MODEL}enable_gradient_checkpointing", swift="gradient_checkpointing"),
        Translation("`teachers.NAME.quantise`", ", for frozen teachers; students train in bf16 or fp32", trl="load_in_4bit load_in_8bit", swift="quant_method quant_bits"),
        Translation("`cluster.shard`", ": FSDP2 over the ranks that torchrun or Ray starts", trl="fsdp fsdp_config deepspeed", verl=f"{_ACTOR}strategy", swift="fsdp deepspeed"),
        Translation(why="plain LoRA is the only kind of adapter", trl="use_dora use_rslora lora_modules_to_save lora_task_type", verl=f"{_MODEL}lora.type", swift="use_dora use_rslora lora_bias lora_dtype modules_to_save"),
        Translation(why="code from a model repository is never run", trl="trust_remote_code", verl=_under("", f"{_MODEL}trust_remote_code data.trust_remote_code")),
        Translation(why="the attention is chosen from the model and the device", trl="attn_implementation", swift="attn_impl"),
        Translation(why="fused kernels and divergences that never hold the logits are used wherever they work", trl="use_liger_kernel", verl=_under(_MODEL, "use_liger use_fused_kernels"), swift="use_liger_kernel"),
        Translation(why="models are loaded as their files say; `train.precision` and `device` are the choices", trl="model_init_kwargs teacher_model_init_kwargs", verl=f"{_MODEL}override_config", swift="model_type model_kwargs device_map"),
        Translation(why="sequences are not split over devices", verl=f"{_ACTOR}ulysses_sequence_parallel_size", swift="sequence_parallel_size"),
        Translation(why="weights and optimiser stay on the device; `cluster.shard` spreads them over several", verl=_under(f"{_ACTOR}fsdp_config.", "param_offload optimizer_offload"), swift="offload_model offload_optimizer"),
        Translation(why="models train without dropout; adapters have `student.lora.dropout`", trl="disable_dropout"),
    ),
    "Teachers": (
        Translation("`teachers.NAME.model`", trl="teacher_model_name_or_path teacher_model", verl=f"{_TEACHER}model_path", tinker="teacher_model teacher_checkpoint teacher_config", swift="teacher_model"),
        Translation("`teachers.NAME.revision`", trl="teacher_model_revision", swift="teacher_model_revision"),
        Translation("`teachers.NAME.address`", ", with `kind: vllm`, `sglang`, `openai` or `served`", trl="teacher_model_server_url use_teacher_server", swift="teacher_model_server"),
        Translation("`teachers.NAME.kind: adapter`", swift="teacher_adapters"),
        Translation("`teachers.NAME.kind`", " (`self`, `base`, `ema` or `refresh`)", trl="teacher_model_kind"),
        Translation("`teachers.NAME.rate`", ", with `kind: ema`", trl="teacher_update_rate"),
        Translation("`teachers.NAME.every`", ", with `kind: refresh`", trl="teacher_sync_steps", tinker="teacher_sync_every"),
        Translation("`teachers.NAME.view.template`", trl="teacher_prompt_template reprompt_template", tinker="demo_template"),
        Translation("`teachers.NAME.view.skip`", trl="num_loss_tokens_to_skip"),
        Translation("`teachers.NAME.view: bytes`", ", for a teacher with another tokenizer", trl="teacher_tokenizer_name_or_path"),
        Translation("`teachers.NAME.domains`", verl=f"{_TEACHER}key"),
        Translation("`route`", ", the column that says which teacher scores a row", verl="distillation.teacher_key", swift="teacher_tag_key"),
        Translation("`pool.resident` and `pool.keep`", swift="offload_teacher_model"),
        Translation("`cluster.teachers: shard`", swift="teacher_deepspeed"),
        Translation("`cluster.servers`", ", with `opd run --on ray`; or a teacher of `kind: served`", verl=_under("distillation.", "n_gpus_per_node nnodes teacher_models.NAME.num_replicas")),
        Translation("`teachers`", ": naming one is enough", verl="distillation.enabled"),
        Translation("a teacher with `teachers.NAME.role: reference`", trl="ref_model", tinker="kl_reference_config", swift="ref_model ref_adapters"),
    ),
    "Prompts": (
        Translation("`prompts`", trl="dataset_name train_dataset", verl="data.train_files", tinker="dataset dataset_configs dataset_builder file_path", swift="dataset"),
        Translation("`prompts.split`", trl="dataset_train_split"),
        Translation("`prompts.eval_source`", "; without it a tenth of each domain's questions is held out", trl="eval_dataset dataset_test_split", verl="data.val_files", swift="val_dataset split_dataset_ratio"),
        Translation("`prompts.columns`", trl="dataset_text_field", verl="data.prompt_key", swift="columns"),
        Translation("`prompts.limit`", verl="data.train_max_samples", tinker="max_prompts"),
        Translation("`prompts.chat_template_kwargs`", trl="chat_template_kwargs", verl="data.apply_chat_template_kwargs", swift="enable_thinking"),
        Translation("`rollout.max_prompt_tokens`", trl="max_prompt_length", verl=f"data.max_prompt_length {_ROLLOUT}prompt_length", tinker="max_prompt_tokens"),
        Translation("`rollout.max_prompt_tokens` and `rollout.max_new_tokens`", trl="max_length max_seq_length", tinker="max_length", swift="max_length"),
        Translation("`data.bad_rows: skip`", ", which leaves prompts that are too long out; none is ever cut", trl="truncation_mode", verl="data.filter_overlong_prompts data.truncation", swift="truncation_strategy"),
        Translation("`seed`", "; every pass over the prompts is shuffled by it", trl="data_seed shuffle_dataset", verl="data.seed data.shuffle", swift="data_seed dataset_shuffle train_dataloader_shuffle"),
        Translation(why="prompts are rendered by the model's own chat template, with `prompts.chat_template_kwargs`; a system message goes into the row's messages", trl="chat_template_path", verl=f"{_MODEL}custom_chat_template", tinker="renderer_name", swift="system use_chat_template"),
        Translation(why="sequences are always packed back to back, without padding", trl="packing packing_strategy padding_free eval_packing pad_to_multiple_of", verl=_under("", f"{_MODEL}use_remove_padding {_ACTOR}use_remove_padding"), swift="packing padding_free padding_side"),
        Translation(why="prompts are read as they are needed, in the trainer's process", trl="dataloader_num_workers dataset_num_proc remove_unused_columns dataset_kwargs dataset_streaming dataloader_drop_last", verl="data.dataloader_num_workers data.filter_overlong_prompts_workers", swift="dataloader_num_workers dataset_num_proc remove_unused_columns streaming lazy_tokenize"),
    ),
    "Rollouts": (
        Translation("`rollout.prompts`", ", per step", verl="data.train_batch_size data.gen_batch_size", tinker="groups_per_batch batch_size"),
        Translation("`rollout.prompts` and `rollout.samples`", ", whose product is the answers of a step; `train.micro_tokens` bounds the memory and does not change the loss", trl="per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation auto_find_batch_size", swift="per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation"),
        Translation("`rollout.samples`", trl="num_generations", verl=f"{_ROLLOUT}n", tinker="group_size", swift="num_generations"),
        Translation("`rollout.max_new_tokens`", trl="max_completion_length max_new_tokens response_length", verl=f"data.max_response_length {_ROLLOUT}response_length", tinker="max_tokens", swift="max_completion_length max_new_tokens response_length"),
        Translation("`rollout.temperature` and `objective.temperature`", ", of sampling and of the divergence", trl="temperature", swift="temperature"),
        Translation("`rollout.temperature`", verl=f"{_ROLLOUT}temperature", tinker="temperature"),
        Translation("`rollout.top_p`", trl="top_p", verl=f"{_ROLLOUT}top_p", swift="top_p"),
        Translation("`rollout.top_k`", " (0 is no limit)", trl="top_k", verl=f"{_ROLLOUT}top_k", swift="top_k"),
        Translation("`rollout.temperature: 0`", ", for greedy answers", verl=f"{_ROLLOUT}do_sample"),
        Translation("`rollout.stop`", swift="stop_words"),
        Translation("`rollout.data_share`", ", which is 1 - lmbda", trl="lmbda", swift="lmbda"),
        Translation("`rollout.teacher_share: 1`", trl="seq_kd generate_from_teacher", swift="seq_kd"),
        Translation("`rollout.contrast`", verl=_under("algorithm.filter_groups.", "enable max_num_gen_batches"), tinker="remove_constant_reward_groups", swift="dynamic_sample max_resample_times"),
        Translation("`rollout.staleness`", trl="max_staleness", verl="async_training.staleness_threshold trainer.v1.sampler.max_off_policy_threshold", tinker="async_config max_steps_off_policy", swift="async_generate"),
        Translation(why="tokens are drawn by temperature, top_p and top_k alone, so that every log-prob is known", trl="min_p repetition_penalty generation_kwargs cache_implementation vllm_structured_outputs_regex", swift="min_p repetition_penalty num_beams structured_outputs_regex"),
        Translation("`rollout.environment`", ", with its `turns`: tools are Python functions of an environment, or an MCP server's", trl="max_tool_calling_iterations", verl=_under(_ROLLOUT, "multi_turn.enable multi_turn.tool_config_path multi_turn.max_assistant_turns agent.default_agent_loop"), tinker="max_turns max_trajectory_tokens", swift="multi_turn_scheduler max_turns use_gym_env gym_env"),
    ),
    "Sampler": (
        Translation("`sampler.engine`", " (`builtin` or `vllm`)", trl="use_vllm", verl=f"{_ROLLOUT}name", swift="use_vllm"),
        Translation("`sampler.address`", ", of engines that run already; without it `sampler.engine: vllm` starts its own", trl="vllm_mode vllm_server_base_url vllm_server_host vllm_server_port", verl=f"{_ROLLOUT}mode", swift="vllm_mode vllm_server_base_url vllm_server_host vllm_server_port"),
        Translation("`sampler.memory`", trl="vllm_gpu_memory_utilization", verl=f"{_ROLLOUT}gpu_memory_utilization", swift="vllm_gpu_memory_utilization"),
        Translation("`sampler.parallel`", trl="vllm_tensor_parallel_size", verl=f"{_ROLLOUT}tensor_model_parallel_size", swift="vllm_tensor_parallel_size"),
        Translation("`sampler.replicas`", verl=f"{_ROLLOUT}data_parallel_size", swift="vllm_data_parallel_size"),
        Translation("`sampler.slots`", verl=f"{_ROLLOUT}max_num_seqs", swift="vllm_max_num_seqs"),
        Translation("`sampler.eager`", verl=f"{_ROLLOUT}enforce_eager", swift="vllm_enforce_eager"),
        Translation("`sampler.dtype`", verl=f"{_ROLLOUT}dtype"),
        Translation("`sampler.patience`", ", seconds", trl="vllm_server_timeout", swift="vllm_server_timeout"),
        Translation("`sampler.lora`", swift="vllm_enable_lora"),
        Translation("`sampler.weights`", " (`file` or `shared`)", trl="vllm_group_port", swift="vllm_server_group_port"),
        Translation("`objective.correction`", " (`kind: tis`, `mis` or `icepop`, with `high`)", trl="vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap vllm_importance_sampling_clip_max distillation_is_clip", verl=_under("algorithm.rollout_correction.", "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold"), swift="rollout_importance_sampling_mode rollout_importance_sampling_threshold"),
        Translation(why="engines make room for the longest prompt and `rollout.max_new_tokens`", trl="vllm_max_model_length", verl=_under(_ROLLOUT, "max_model_len max_num_batched_tokens"), swift="vllm_max_model_len max_model_len"),
        Translation(why="engines keep their share of the memory, `sampler.memory`", trl="vllm_enable_sleep_mode", verl=f"{_ROLLOUT}free_cache_engine", swift="sleep_level"),
        Translation(why="engines get the new weights after every update", trl="vllm_sync_frequency ds3_gather_for_generation weight_sync_steps", swift="ds3_gather_for_generation move_model_batches"),
    ),
    "Objective": (
        Translation("`objective.form`", "; `opd recipes list` names ready ones (`methods/gkd`, `methods/grpo`, …)", swift="rlhf_type"),
        Translation("`objective.beta`", ", with `divergence: jsd`; GRPO's is the `objective.coefficient` of a second term with `objective.role: reference`", trl="beta", swift="beta"),
        Translation("`objective.beta`", ", with `divergence: jsd`", trl="distillation_alpha"),
        Translation("`objective.form` and `objective.divergence`", ": `k1` with a policy gradient is `form: policy_gradient`, `k2` is `form: k2`, `k3` and `forward_kl_topk` are `divergence: forward_kl`", verl=f"{_LOSS}loss_mode"),
        Translation("`objective.form`", " (`policy_gradient` or `direct`)", trl="distillation_mode distillation_objective rkl_advantage single_step_decomposition", verl=f"{_LOSS}use_policy_gradient"),
        Translation("`objective.form`", " (`uld` or `gold`)", trl="use_uld_loss use_extended_uld uld_use_hybrid_loss"),
        Translation("`objective.matched_weight`", ", with `form: gold`", trl="uld_hybrid_matched_weight"),
        Translation("`objective.unmatched_weight`", ", with `form: gold`", trl="uld_hybrid_unmatched_weight"),
        Translation("`objective.k`", ", with `support: topk`; without it the divergence is over the full vocabulary", trl="loss_top_k distillation_topk", verl=f"{_LOSS}topk", tinker="topk n_teacher_targets", swift="gkd_logits_topk"),
        Translation("`objective.closure: tail`", ", with `support: topk`", trl="loss_add_tail distillation_add_tail"),
        Translation("`objective.coefficient`", trl="distillation_weight", verl=f"{_LOSS}distillation_loss_coef"),
        Translation("a second term with `objective.form: cross_entropy` and this `objective.coefficient`", trl="uld_crossentropy_weight", swift="sft_alpha"),
        Translation("`objective.advantage.teacher_weight`", ", with `form: policy_gradient`", tinker="kl_penalty_coef", swift="teacher_kl_coef"),
        Translation("`objective.advantage.outcome_weight`", verl=f"{_LOSS}use_task_rewards"),
        Translation("`objective.advantage.clip`", ", with `form: policy_gradient`; an exact divergence needs none", verl=_under(_LOSS, "loss_max_clamp log_prob_min_clamp")),
        Translation("`objective.advantage.discount`", trl="gamma", tinker="kl_discount_factor"),
        Translation("`objective.advantage.length_normalised`", trl="length_normalization"),
        Translation("`objective.advantage.baseline`", verl="algorithm.adv_estimator", swift="advantage_estimator"),
        Translation("`objective.advantage.std`", trl="scale_rewards", verl="algorithm.norm_adv_by_std_in_grpo", swift="scale_rewards"),
        Translation("`objective.advantage.overlong: mask`", trl="mask_truncated_completions", swift="overlong_filter"),
        Translation("`objective.advantage.overlong_buffer`", ", with `overlong: penalise`", swift="soft_cache_length"),
        Translation("`objective.advantage.reference_weight`", verl="algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", swift="kl_in_reward"),
        Translation("a second term with `objective.role: reference` and this `objective.coefficient`", verl=_under(_ACTOR, "use_kl_loss kl_loss_coef kl_loss_type")),
        Translation("`objective.surrogate`", " (`importance_sampling`, `ppo`, `cispo` or `gspo`)", trl="importance_sampling_level", verl=_under("", f"{_ACTOR}policy_loss.loss_mode {_LOSS}policy_loss_mode"), tinker="loss_fn loss_fn_config", swift="importance_sampling_level"),
        Translation("`objective.surrogate.low` and `objective.surrogate.high`", trl="epsilon epsilon_high cliprange", verl=f"{_under(_ACTOR, 'clip_ratio clip_ratio_low clip_ratio_high')} {_under(_LOSS, 'clip_ratio clip_ratio_low clip_ratio_high')}", swift="epsilon epsilon_high cliprange"),
        Translation("`objective.surrogate.dual`", ", with `kind: ppo`", trl="delta", verl=f"{_ACTOR}clip_ratio_c", swift="delta"),
        Translation("`objective.aggregate`", " (`token_mean`, `sequence_mean`, `prompt_mean` or `constant`)", trl="loss_type", verl=f"{_ACTOR}loss_agg_mode", swift="loss_type"),
        Translation("`objective.denominator`", ", with `aggregate: constant`", verl=f"{_ACTOR}loss_scale_factor"),
        Translation("`objective.gate: entropy`", ", with `share`", trl="top_entropy_quantile", swift="top_entropy_quantile"),
        Translation(why="no term rewards entropy; the monitor `diversity` watches it", trl="entropy_coef use_adaptive_entropy", verl=f"{_ACTOR}entropy_coeff"),
        Translation(why="only tokens of answers are trained on, never those of prompts", trl="completion_only_loss assistant_only_loss", tinker="train_on_what", swift="loss_scale"),
        Translation("`objective.coefficient`", ", of a term with `form: value`", trl="vf_coef", swift="vf_coef"),
        Translation("`objective.clip`", ", of a term with `form: value`", trl="cliprange_value", verl="critic.cliprange_value", swift="cliprange_value"),
        Translation("`objective.advantage.also`", ": `{kind: gae, gamma: …, lam: …}`, as in `methods/ppo`", trl="lam", verl="algorithm.lam algorithm.gamma", swift="lam gamma"),
        Translation("`modules.value.lr`", ", with `kind: head`", verl="critic.optim.lr"),
        Translation("`objective.coefficient`", ", of the policy's term: `{after: …}`", verl="trainer.critic_warmup"),
        Translation(why="values come from a head on the student, not from a model of their own", verl="critic.model.path"),
        Translation(why="targets are not smoothed; `objective.divergence` is the teacher's whole distribution", trl="label_smoothing_factor label_smoothing", swift="label_smoothing"),
    ),
    "Rewards": (
        Translation("`rewards`", " (a kind, or `file.py:function` for your own)", trl="reward_funcs", verl="custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path reward.custom_reward_function.name data.reward_fn_key reward.reward_manager.name", swift="reward_funcs external_plugins"),
        Translation("`rewards.weight`", ", of each reward in a list", trl="reward_weights", swift="reward_weights"),
        Translation("`rewards`", ", with `kind: chat`: a model at an endpoint", trl="reward_model_path", verl="reward_model.enable reward_model.model.path reward.reward_model.enable reward.reward_model.model_path", swift="reward_model"),
        Translation("`rewards.sandbox`", ": code runs on this machine, in a sandbox", verl="sandbox_fusion.url reward.sandbox_fusion.url", tinker="sandbox_backend"),
    ),
    "Training": (
        Translation("`train.lr`", trl="learning_rate", verl=f"{_OPTIM}lr", tinker="learning_rate", swift="learning_rate"),
        Translation("`train.steps`", trl="max_steps", verl=f"trainer.total_training_steps {_OPTIM}total_training_steps", tinker="max_steps", swift="max_steps"),
        Translation("`train.steps`", ": rows times epochs, divided by `rollout.prompts`; `train.epochs` are passes over one batch", trl="num_train_epochs", verl="trainer.total_epochs", tinker="num_epochs", swift="num_train_epochs max_epochs"),
        Translation("`train.epochs`", trl="num_iterations num_ppo_epochs", verl=f"{_ACTOR}ppo_epochs", swift="num_iterations num_ppo_epochs"),
        Translation("`train.minibatches`", ", the updates per batch: prompts of a batch divided by those of an update", trl="num_mini_batches", verl=f"{_ACTOR}ppo_mini_batch_size", swift="num_mini_batches"),
        Translation("`train.minibatches`", tinker="num_substeps"),
        Translation("`train.micro_tokens`", ", tokens per micro-batch", verl=f"{_under(_ACTOR, 'ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz')} {_under(_ROLLOUT, 'log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz')}", trl="token_budget"),
        Translation("`train.warmup`", ", in steps", trl="warmup_steps warmup_ratio", verl=_under(_OPTIM, "lr_warmup_steps lr_warmup_steps_ratio"), swift="warmup_steps warmup_ratio"),
        Translation("`train.schedule`", " (`constant`, `linear` or `cosine`)", trl="lr_scheduler_type", verl=_under(_OPTIM, "lr_scheduler_type warmup_style"), tinker="lr_schedule", swift="lr_scheduler_type"),
        Translation("`train.weight_decay`", trl="weight_decay", verl=f"{_OPTIM}weight_decay", swift="weight_decay"),
        Translation("`train.betas`", trl="adam_beta1 adam_beta2", verl=f"{_OPTIM}betas", tinker="adam_beta1 adam_beta2", swift="adam_beta1 adam_beta2"),
        Translation("`train.eps`", trl="adam_epsilon", tinker="adam_eps", swift="adam_epsilon"),
        Translation("`train.clip`", trl="max_grad_norm", verl=f"{_ACTOR}grad_clip {_OPTIM}clip_grad", swift="max_grad_norm"),
        Translation("`seed`", tinker="dataset_seed", verl=_under("", f"{_ROLLOUT}seed {_ACTOR}data_loader_seed")),
        Translation("`device`", trl="use_cpu no_cuda", verl="trainer.device"),
        Translation("`cluster.trainers`", ", with `opd run --on ray`; or `torchrun --nproc-per-node`", verl="trainer.n_gpus_per_node trainer.nnodes"),
        Translation("`train.optimiser`", " (`adamw`, `muon` or `adamw8bit`, with its settings)", trl="optim optim_args", verl=_under(_OPTIM, "optimizer optimizer_impl override_optimizer_config"), swift="optim optimizer"),
        Translation(why="`linear` and `cosine` have no further settings", trl="lr_scheduler_kwargs", verl=_under(_OPTIM, "min_lr_ratio num_cycles"), swift="lr_scheduler_kwargs"),
        Translation(why="passes on a GPU are recorded as graphs where that works; `sampler.compile` is the sampler's", trl="torch_compile", verl=f"{_ACTOR}use_torch_compile"),
        Translation(why="models train in this process, on your own devices", tinker="base_url ttl_seconds rolling_ttl_seconds"),
        Translation(why="the `kl` monitor and the metrics compare before and after every step anyway", tinker="compute_post_kl"),
    ),
    "Evaluation": (
        Translation("`eval.every`", trl="eval_steps eval_strategy evaluation_strategy", verl="trainer.test_freq", tinker="eval_every", swift="eval_steps eval_strategy"),
        Translation("`eval.prompts`", ", per domain", verl="data.val_max_samples", swift="eval_limit"),
        Translation("`eval.k`", trl="num_generations_eval", verl=f"{_ROLLOUT}val_kwargs.n", swift="num_generations_eval"),
        Translation("`eval.temperature`", verl=f"{_ROLLOUT}val_kwargs.temperature"),
        Translation("`eval.further`", tinker="evaluator_builders", swift="eval_dataset"),
        Translation("`eval.metric`", "; the best checkpoint is always kept", trl="metric_for_best_model load_best_model_at_end greater_is_better", swift="metric_for_best_model load_best_model_at_end eval_metric"),
        Translation("`eval.early_stop`", swift="early_stop_interval"),
        Translation("`eval.prompts: 0`", ", to leave evaluations out; otherwise there is one before the first step", trl="eval_on_start do_eval", verl="trainer.val_before_train"),
        Translation("`opd eval`", verl="trainer.val_only"),
        Translation(why="evaluations are sampled like training, and need no batch size", trl="per_device_eval_batch_size eval_accumulation_steps", verl="data.val_batch_size", swift="per_device_eval_batch_size"),
    ),
    "Runs": (
        Translation("`opd run RECIPE --out DIR`", trl="output_dir", verl="trainer.default_local_dir", tinker="log_path log_dir", swift="output_dir"),
        Translation("`name`", trl="run_name", verl="trainer.experiment_name", tinker="recipe_name wandb_name", swift="run_name"),
        Translation("`checkpoint.every`", trl="save_steps save_strategy", verl="trainer.save_freq", tinker="save_every rolling_save_every", swift="save_steps save_strategy"),
        Translation("`checkpoint.keep`", trl="save_total_limit", verl="trainer.max_actor_ckpt_to_keep", swift="save_total_limit"),
        Translation("`opd resume RUN`", "; or `opd run RECIPE --out DIR --resume`", trl="resume_from_checkpoint", verl="trainer.resume_mode trainer.resume_from_path", tinker="behavior_if_log_dir_exists", swift="resume_from_checkpoint"),
        Translation("`log.to`", trl="report_to", verl="trainer.logger", swift="report_to"),
        Translation("`log.project`", trl="project", verl="trainer.project_name", tinker="wandb_project", swift="swanlab_project"),
        Translation("`log.samples`", trl="log_completions num_completions_to_print", verl="trainer.log_val_generations", tinker="num_groups_to_log", swift="log_completions"),
        Translation("`log.samples_every`", trl="log_completions_steps"),
        Translation("`hub.repo`", trl="hub_model_id push_to_hub", swift="hub_model_id push_to_hub"),
        Translation("`hub.private`", trl="hub_private_repo", swift="hub_private_repo"),
        Translation(why="the login of `hf auth login`, or the variable HF_TOKEN, is used", trl="hub_token", swift="hub_token"),
        Translation(why="every step is logged", trl="logging_steps logging_strategy logging_first_step", swift="logging_steps logging_first_step"),
        Translation(why="every checkpoint is a whole model directory with the state to resume from", trl="save_only_model", verl=f"{_ACTOR}checkpoint.save_contents", swift="save_only_model"),
    ),
}  # fmt: skip


def translate(path: Sequence[str]) -> str:
    """What another framework's key is called here, as a sentence; empty if no framework has it.

    >>> translate(["train", "num_generations"])
    '`num_generations` of TRL and ms-swift is `rollout.samples` here'
    >>> translate(["actor_rollout_ref", "rollout", "n"])
    "verl's `actor_rollout_ref.rollout.n` is `rollout.samples` here"
    """
    parts = tuple(part.lstrip("+") for part in path)  # Hydra's +key=value
    scored = [(_match(key, parts), framework, ".".join(key), row) for framework, key, row in _known()]
    best = max(score for score, *_ in scored)
    found: dict[Translation, dict[str, str]] = {}  # row -> framework -> the first of its keys
    for score, framework, key, row in scored:
        if score == best > NO_MATCH:
            found.setdefault(row, {}).setdefault(framework, key)
    sentences = []
    for row, keys in found.items():
        for key in dict.fromkeys(keys.values()):
            sentences.append(row.sentence([framework for framework, one in keys.items() if one == key], key))
    return "; ".join(sentences)


def translate_below(path: Sequence[str], value: Any) -> str:
    """The same for every key of an unknown mapping, such as verl's `trainer`."""
    if not isinstance(value, Mapping):
        return translate(path)
    found = [sentence for leaf in _leaves(tuple(path), value) if (sentence := translate(leaf))]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "; ".join([*dict.fromkeys(found[:MOST]), *more])


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    else:
        yield path


@cache
def _known() -> list[tuple[str, tuple[str, ...], Translation]]:
    rows = [row for section in GLOSSARY.values() for row in section]
    return [
        (framework, tuple(key.split(".")), row)
        for row in rows
        for framework, keys in row.keys().items()
        for key in keys
    ]


def _match(key: tuple[str, ...], parts: tuple[str, ...]) -> tuple[int, bool]:
    """How well the path of an unknown key matches this key: the number of common parts from the end, and whether all match.

    One distinctive word (`ppo_epochs`) is enough; `n` and `path` are not.
    """
    common = 0
    for one, other in zip(reversed(key), reversed(parts), strict=False):
        if one not in (other, ANY):
            break
        common += 1
    whole = common == len(key)
    enough = whole or (common and "_" in parts[-1]) or common == len(parts) > 1
    return (common, whole) if enough else NO_MATCH


def table() -> str:
    """The table of docs/coming-from.md, in Markdown."""
    lines = []
    for section, rows in GLOSSARY.items():
        lines += [f"## {section}", "", "| TRL | verl | tinker-cookbook | ms-swift | here |", "|---|---|---|---|---|"]
        for row in rows:
            keys = row.keys()
            cells = [
                ", ".join(f"`{key}`" for key in keys.get(framework, ()))
                for framework in ("TRL", "verl", "tinker-cookbook", "ms-swift")
            ]
            lines.append(f"| {' | '.join(cells)} | {f'{row.here}{row.note}' if row.here else f'none: {row.why}'} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(table(), end="")

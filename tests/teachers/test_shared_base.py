"""Adapters over one shared base: the merged models' answers, one base in memory, and nobody writes to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import opd
from opd.common.errors import ModelError
from opd.models import load_model
from opd.models.attention import Packed
from opd.models.language_model import AdaptedModel
from opd.models.load import weights_hash
from opd.models.settings import Lora
from opd.recipe import load_recipe
from opd.runner import stage
from opd.runner.checks import check_stage
from opd.teachers.kinds import AdapterTeacher
from opd.teachers.mixture import MixtureTeacher
from tests.support.helpers import save_tiny

pytest.importorskip("peft")
IDS, LAYOUT = torch.tensor([3, 5, 7, 9, 4, 8, 11]), Packed.of([4, 3])


def adapter(directory: Path, base: str, seed: int = 0, targets: Any = "all-linear", rank: int = 4) -> Path:
    """An adapter with random factors, as a run with `student.lora` saves it."""
    model = load_model(base, lora=Lora(rank=rank, alpha=8, targets=targets))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.normal_(std=0.1)
    model.save(directory)
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return directory / "adapter"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "base", "qwen3")


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        adapter(root / "one", base, 1),
        adapter(root / "two", base, 2, targets=["q_proj", "v_proj"], rank=2),
    ]


def test_an_adapted_model_is_the_merged_one_and_shares_its_base(base: str, adapters: list[Path]) -> None:
    below = load_model(base)
    before = {name: parameter.detach().clone() for name, parameter in below.module.named_parameters()}
    models = [AdaptedModel(below, str(path), path) for path in adapters]
    for _ in range(2):  # in turn, so that one could disturb the other
        for model, path in zip(models, adapters, strict=True):
            merged = load_model(str(path)).hidden(IDS, LAYOUT)
            assert (model.hidden(IDS, LAYOUT) - merged).abs().max() < 1e-5
            assert (model.hidden(IDS, LAYOUT) - below.hidden(IDS, LAYOUT)).abs().max() > 1e-2
            assert (model.inference_copy().hidden(IDS, LAYOUT) - merged).abs().max() < 1e-5
    for name, parameter in below.module.named_parameters():
        assert torch.equal(parameter, before[name])
    places = {parameter.data_ptr() for parameter in below.module.parameters()}
    for model in models:
        own = [parameter for parameter in model.module.parameters() if parameter.data_ptr() not in places]
        assert sum(parameter.numel() for parameter in own) == sum(
            tensor.numel() for tensor in load_file(Path(model.name) / "adapter_model.safetensors").values()
        )


def recipe(base: str, adapters: list[Path], **keys: Any) -> dict[str, Any]:
    kind = keys.pop("kind", "adapter")
    teachers = {name: {"kind": kind, "model": str(path)} for name, path in zip("ab", adapters, strict=True)}
    return {
        "student": {"model": base, "lora": {"rank": 2}},
        "teachers": teachers,
        "prompts": [{"source": "task:addition", "domain": "a"}, {"source": "task:sort", "domain": "b"}],
        "rollout": {"prompts": 4, "samples": 1, "max_new_tokens": 6},
        "train": {"steps": 1},
        "eval": {"prompts": 0},
        "device": "cpu",
        **keys,
    }


def run(tmp_path: Path, name: str, spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    done = opd.run(path, out=tmp_path / name)
    return done, done.metrics[-1]


def test_scores_of_an_adapter_are_kept_under_its_own_weights_and_those_of_its_base(adapters: list[Path]) -> None:
    kinds = [AdapterTeacher(model=str(path)) for path in adapters]
    mixed = MixtureTeacher(parts={"one": kinds[0], "two": kinds[1]})
    assert [ref.model for ref in mixed.scored_with()] == [str(path) for path in adapters]
    hashes = {weights_hash(ref.model) for ref in (*mixed.scored_with(), *kinds[0].reads())}
    assert len(hashes) == 3


def test_a_run_learns_from_adapters_over_its_own_base(
    tmp_path: Path, base: str, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = stage.load_model

    def counted(name: str, **settings: Any) -> Any:
        loaded.append(name)
        return load(name, **settings)

    monkeypatch.setattr("opd.runner.stage.load_model", counted)
    monkeypatch.setattr("opd.teachers.quantised.load_model", counted)
    evaluated = {"eval": {"prompts": 1, "max_new_tokens": 2}}
    _, found = run(tmp_path, "shared", recipe(base, adapters, **evaluated))
    assert loaded == [base]  # once: the student's own base is the teachers'
    _, merged = run(tmp_path, "merged", recipe(base, adapters, kind="frozen", **evaluated))
    assert found["reverse_kl"] == pytest.approx(merged["reverse_kl"], rel=1e-4)
    assert found["kl/a"] == pytest.approx(merged["kl/a"], rel=1e-4)
    recorded = json.loads((tmp_path / "shared" / "run.json").read_text())
    assert str(adapters[1] / "adapter_model.safetensors") in json.dumps(recorded)  # a resume looks at it again


@pytest.mark.slow
def test_teachers_that_are_adapters_can_sample_and_be_mixed_in(tmp_path: Path, base: str, adapters: list[Path]) -> None:
    spec = recipe(base, adapters, objective={"on": ["student", "teacher"]})
    spec["rollout"] |= {"teacher_share": 0.5, "teacher_mix": 0.25}
    merged = {**spec, "teachers": recipe(base, adapters, kind="frozen")["teachers"]}
    stores = [run(tmp_path, name, found)[0].rollouts for name, found in (("s", spec), ("m", merged))]
    shared, plain = (store.load(list(store.entries)) for store in stores)
    assert [rollout.source for rollout in shared] == [rollout.source for rollout in plain]
    for one, other in zip(shared, plain, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")

    return edit


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_edit(r=3), "is .* and should be .*another rank"),
        (_edit(base_model_name_or_path="../wide"), "another base than"),
        (_edit(base_model_name_or_path="../short"), "does not have .* made for another model"),
        (_edit(target_modules=["nonsense"]), "does not fit its base"),
        (_edit(peft_type="IA3"), "is a IA3, and only LoRA"),
        (_edit(use_dora=True), "has use_dora True"),
        (_edit(init_lora_weights="pissa"), "has init_lora_weights 'pissa'"),
        (_edit(bias="all"), "has bias 'all'"),
        (_edit(base_model_name_or_path=None), "names no base model"),
        (_tensors(lambda found: found.pop(FIRST)), "lacks .*q_proj.lora_A"),
        (_tensors(lambda found: found.update({FIRST.replace("q_proj", "x_proj"): torch.ones(2, 2)})), "does not have"),
        (_tensors(lambda found: found.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)})), "embeddings"),
        (_tensors(lambda found: found.update({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)})), "output head"),
        (_tensors(lambda found: found.update({"base_model.model.model.norm.weight": torch.ones(2)})), "whole tensors"),
        (lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"no"), "adapter_model.safetensors"),
        (lambda directory: (directory / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors; pickled"),
        (lambda directory: (directory / "adapter_config.json").unlink(), "no directory with an adapter_config.json"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_are_rejected_before_weights_are_loaded(
    tmp_path: Path, base: str, adapters: list[Path], damage: Callable[[Path], None], words: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in adapters[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    damage(broken)
    config = broken / "adapter_config.json"
    for name, shape in {"wide": {"hidden_size": 64}, "short": {"num_hidden_layers": 1}}.items():
        if config.is_file() and f"../{name}" in config.read_text():
            save_tiny(tmp_path / name, "qwen3", **shape)
    with pytest.raises(ModelError, match=words):
        check_stage(load_recipe(recipe(base, [adapters[0], broken])).stages[0], lambda name: name)

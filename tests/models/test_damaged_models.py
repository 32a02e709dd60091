"""Model directories and GGUF files that are damaged, hostile or absurd: one sentence each, no traceback, no hang, no code run."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers

from opd.common.errors import ModelError
from opd.models import load_config, load_model, load_tokenizer, locate, parameter_count
from opd.models.gguf import check_header
from opd.recipe import Lora
from tests.support.families import family_named
from tests.support.gguf_files import llama_tensors, write_gguf
from tests.support.helpers import save_tiny, tiny_tokenizer

FUZZED = int(os.environ.get("COUNT") or 300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three shards."""
    directory = tmp_path_factory.mktemp("models") / "whole"
    save_tiny(directory)
    model = load_model(str(directory))
    (directory / "model.safetensors").unlink()
    model.module.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda d: shard(d).unlink(), "00002.*is missing"),
    "truncated shard": (lambda d: cut(shard(d), 0.5), "00002.*truncated"),
    "empty shard": (lambda d: shard(d).write_bytes(b""), "00002.*truncated"),
    "header garbage": (lambda d: shard(d).write_bytes(struct.pack("<Q", 64) + b"\xff" * 5000), "00002.*header"),
    "endless header": (lambda d: shard(d).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "00002.*header"),
    "shard is a directory": (lambda d: become_directory(shard(d)), "00002"),
    "no weights": (lambda d: [p.unlink() for p in d.glob("model*")], "no .safetensors"),
    "shard elsewhere": (lambda d: edit(d / "model.safetensors.index.json", weight_map={"a": "../x.safetensors"}), "not a file of"),
    "absolute shard": (lambda d: edit(d / "model.safetensors.index.json", weight_map={"a": "/etc/passwd"}), "not a file of"),
    "index without map": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "index garbage": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json is not JSON"),
    "config garbage": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "config list": (lambda d: (d / "config.json").write_text("[]"), "config.json holds a list"),
    "config bytes": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not JSON"),
    "config nested": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    "config long number": (lambda d: (d / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}"), "config.json is not JSON"),
    "no model type": (lambda d: edit(d / "config.json", model_type=None), "config"),
    "unknown type": (lambda d: edit(d / "config.json", model_type="no_such"), "no_such"),
    "wrong kind of value": (lambda d: edit(d / "config.json", hidden_size="wide"), "hidden_size"),
    "no heads": (lambda d: edit(d / "config.json", num_attention_heads=0), "config|model"),
    "wrong shape": (lambda d: edit(d / "config.json", intermediate_size=49), "mlp|size|shape"),
    "no layer": (lambda d: edit(d / "config.json", num_hidden_layers=-1), "at least one layer"),
    "a billion layers": (lambda d: edit(d / "config.json", num_hidden_layers=10**9), "num_hidden_layers 1000000000"),
    "more layers than tensors": (lambda d: edit(d / "config.json", num_hidden_layers=5000), "weight files hold 21 tensors"),
    "endless layers": (lambda d: edit(d / "config.json", num_hidden_layers=float("inf")), "num_hidden_layers"),
    "a norm of nothing": (lambda d: edit(d / "config.json", rms_norm_eps=float("nan")), "rms_norm_eps nan, which is not a usable number"),
    "endless rotation": (lambda d: edit(d / "config.json", rope_parameters={"rope_theta": float("inf")}), "rope_theta inf"),
    "in the words of transformers": (lambda d: edit(d / "config.json", attention_dropout={"__float__": "NaN"}), "attention_dropout nan"),
    "many kinds of layers": (lambda d: edit(d / "config.json", layer_types=["full_attention"] * 10**5), r"layer_types. \(100000\)"),
    "a vast vocabulary": (lambda d: edit(d / "config.json", vocab_size=10**12), "weight files hold"),
    "a vast width": (lambda d: edit(d / "config.json", intermediate_size=10**9), "weight files hold"),
    "vast positions": (lambda d: edit(d / "config.json", max_position_embeddings=10**15), "max_position_embeddings"),
    "tokenizer garbage": (lambda d: (d / "tokenizer.json").write_text("{,"), "tokenizer.json is not JSON"),
    "tokenizer of nothing": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer"),
    "truncated tokenizer": (lambda d: cut(d / "tokenizer.json", 0.5), "tokenizer.json is not JSON"),
    "tokenizer config garbage": (lambda d: (d / "tokenizer_config.json").write_text("}"), "tokenizer_config.json"),
    "generation config garbage": (lambda d: (d / "generation_config.json").write_text("}"), "generation_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_one_sentence(damage: str, copy: Path) -> None:
    change, words = DAMAGES[damage]
    change(copy)
    with pytest.raises(ModelError, match=words) as caught:
        load_model(str(copy))
    assert str(copy) in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_what_needs_no_weights_is_found_without_loading_them(copy: Path) -> None:
    """A dry run counts parameters; it must not build a billion layers, nor miss a shard that is not there."""
    assert parameter_count(str(copy)) > 0
    cut(shard(copy), 0.9)
    with pytest.raises(ModelError, match="truncated"):
        load_config(str(copy))


def test_names_of_leftover_tensors_are_not_printed(copy: Path) -> None:
    """transformers lists them in a table, as they are in the file."""
    save_file({"\x1b]0;owned\x07": torch.zeros(1)}, copy / "model-extra.safetensors", {"format": "pt"})
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["\x1b]0;owned\x07"] = "model-extra.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        load_model(str(copy))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert "owned" not in said.getvalue()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "~nobody-here/model", "a/b/c", ".", "\n"])
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(ModelError):
        load_config(name)


def test_a_revision_of_something_local_is_rejected(copy: Path) -> None:
    for name in (str(copy), "tiny/generalist"):
        with pytest.raises(ModelError, match="no revisions"):
            locate(name, "main")
    assert locate("someone/model", "main").revision == "main"


# Code that comes with a model


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nPath({ran!r}).touch()\n"
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = 'hostile'
class Model(LlamaForCausalLM): config_class = Config
class Words(PreTrainedTokenizerFast): pass
"""


def test_code_that_comes_with_a_model_never_runs_even_if_the_user_confirms(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A type that transformers knows loads with the stock class; any other is rejected. Neither asks."""
    ran = tmp_path / "ran"
    table = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Words", "code.Words"],
    }
    for model_type in ("llama", "hostile"):
        directory = Path(shutil.copytree(whole, tmp_path / model_type))
        (directory / "code.py").write_text(CODE.format(ran=str(ran)) + CLASSES)
        edit(directory / "config.json", auto_map=table, model_type=model_type)
        edit(
            directory / "tokenizer_config.json",
            auto_map=table,
            **({"tokenizer_class": "Words"} if model_type == "hostile" else {}),
        )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    found: list[str] = []
    for name in ("llama", "hostile"):
        for load in (load_tokenizer, load_config, parameter_count, load_model):
            try:
                load(str(tmp_path / name))
                found.append("loaded")
            except ModelError as error:
                found.append(str(error))
    assert not ran.exists()
    said = capfd.readouterr()
    assert "[y/N]" not in said.out + said.err
    assert found[:4] == ["loaded"] * 4
    assert all("never run" in line for line in found[5:])  # its tokenizer is a plain one under another name


# Tokenizers


@pytest.mark.parametrize(
    "bomb",
    [
        normalizers.Sequence([normalizers.Replace("a", "a" * 10) for _ in range(12)]),
        normalizers.Sequence([normalizers.Replace(Regex("a"), "a" * 50) for _ in range(4)]),
        normalizers.Sequence([normalizers.Replace(Regex(""), "aa") for _ in range(30)]),
    ],
)
def test_a_tokenizer_that_makes_text_much_longer_is_rejected(bomb: Any, copy: Path) -> None:
    tokenizer = load_tokenizer(str(copy))
    tokenizer.backend_tokenizer.normalizer = bomb
    tokenizer.save_pretrained(copy)
    with pytest.raises(ModelError, match="times longer"):
        load_tokenizer(str(copy))


def test_a_token_of_a_million_letters_is_rejected(copy: Path) -> None:
    tokenizer = load_tokenizer(str(copy))
    tokenizer.add_tokens(["x" * 1_000_000])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ModelError, match="1000000 characters"):
        load_tokenizer(str(copy))


def test_ordinary_replacements_are_fine(copy: Path) -> None:
    tokenizer = load_tokenizer(str(copy))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.NFKC(),
        ]
    )
    tokenizer.save_pretrained(copy)
    load_tokenizer(str(copy))


# GGUF


def gguf(fields: bytes = b"", count: int = 0, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + fields


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HEADERS = {
    "empty": (b"", "not a GGUF"),
    "another file": (b"PK\x03\x04" + b"0" * 100, "not a GGUF"),
    "cut": (b"GGUF\x03", "damaged"),
    "endless fields": (gguf(count=1 << 60), "damaged"),
    "endless key": (gguf(struct.pack("<Q", 1 << 60), 1), "damaged"),
    "unknown type": (gguf(text("a") + struct.pack("<I", 99), 1), "damaged"),
    "endless array": (gguf(text("a") + struct.pack("<IIQ", 9, 4, 1 << 60) + b"0" * 64, 1), "damaged"),
    "arrays in arrays": (gguf(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500, 1), "damaged"),
    "a billion layers": (gguf(text("llama.block_count") + struct.pack("<II", 4, 10**9), 1), "num_hidden_layers 1000000000"),
    "layers without tensors": (gguf(text("llama.block_count") + struct.pack("<II", 4, 12), 1, 3), "hold 3 tensors"),
    "nothing inside": (gguf(), "GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_gguf_files_are_rejected(header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content, words = HEADERS[header]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path / "m.gguf"))


def test_gguf_headers_cut_or_changed_anywhere(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_tensors())
    good = path.read_bytes()
    header = len(good) - sum(values.nbytes for values in llama_tensors().values())
    check_header(path)
    generator = random.Random(0)
    refused = 0
    for trial in range(300):
        bad = bytearray(good)
        for _ in range(generator.randint(1, 3)):
            bad[generator.randrange(header)] = generator.randrange(256)
        path.write_bytes(bytes(bad) if trial % 2 else good[: generator.randrange(len(good))])
        try:
            check_header(path)
        except ModelError:
            refused += 1
    assert refused >= 150  # every cut, at least


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "opd"


def test_a_complete_gguf_file_has_exactly_its_tensors(tmp_path: Path, cached: Path) -> None:
    tensors = llama_tensors()
    write_gguf(tmp_path / "m.gguf", tensors)
    assert parameter_count(str(tmp_path / "m.gguf")) == sum(values.size for values in tensors.values())
    module = load_model(str(tmp_path / "m.gguf")).module
    wanted = {"token_embd.weight": module.model.embed_tokens, "blk.1.ffn_up.weight": module.model.layers[1].mlp.up_proj}
    for name, part in wanted.items():
        assert torch.equal(part.weight, torch.from_numpy(tensors[name]))


@pytest.mark.parametrize("name", sorted(llama_tensors()))
def test_a_gguf_file_that_lacks_a_tensor_is_rejected_before_anything_is_made_of_it(
    name: str, tmp_path: Path, cached: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", {key: values for key, values in llama_tensors().items() if key != name})
    with pytest.raises(ModelError, match=f"lacks {name}, which would be random"):
        parameter_count(str(tmp_path / "m.gguf"))
    assert not cached.exists()


def changed(**tensors: Any) -> dict[str, Any]:
    return llama_tensors() | {key.replace("__", "."): values for key, values in tensors.items()}


WRONG = {
    "a shape": (changed(blk__0__ffn_up__weight=np.ones((63, 32), np.float32)), "2,016 elements for model.layers.0.mlp.up_proj.weight.*2,048"),
    "a bias": (changed(blk__0__attn_q__bias=np.ones(32, np.float32)), "has blk.0.attn_q.bias, which LlamaForCausalLM"),
    "a layer": (llama_tensors(layers=3), "has blk.2.* more tensors, which LlamaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_gguf_file_whose_tensors_are_not_its_models_is_rejected(wrong: str, tmp_path: Path, cached: Path) -> None:
    tensors, words = WRONG[wrong]
    write_gguf(tmp_path / "m.gguf", tensors)
    with pytest.raises(ModelError, match=words):
        parameter_count(str(tmp_path / "m.gguf"))
    assert not cached.exists()


def test_a_truncated_gguf_file_and_one_without_tensors_are_rejected(tmp_path: Path, cached: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama_tensors())
    cut(tmp_path / "m.gguf", 0.9)
    with pytest.raises(ModelError, match=r"is truncated: .* ends at byte"):
        parameter_count(str(tmp_path / "m.gguf"))
    field = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    (tmp_path / "small.gguf").write_bytes(gguf(field, 1))  # transformers would initialise a llama of seven billion
    with pytest.raises(ModelError, match="has no tensors"):
        parameter_count(str(tmp_path / "small.gguf"))
    write_gguf(tmp_path / "one.gguf", {"output_norm.weight": np.ones(32, np.float32)}, layers=1)
    with pytest.raises(ModelError, match="its metadata describe"):
        parameter_count(str(tmp_path / "one.gguf"))
    assert not cached.exists()


def test_what_an_earlier_version_made_of_a_gguf_file_is_not_believed(tmp_path: Path, cached: Path, whole: Path) -> None:
    """It may have random weights in place of missing ones, and looks like any other model."""
    file = tmp_path / "m.gguf"
    write_gguf(file, {key: values for key, values in llama_tensors().items() if "ffn_up" not in key})
    facts = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    shutil.copytree(whole, cached / f"m-{key}")
    with pytest.raises(ModelError, match="lacks blk"):
        load_model(str(file))


# Tensors against the config, before there is memory for any


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """The shards as one file, with other tensors in it."""
    tensors = {key: value for path in sorted(directory.glob("*.safetensors")) for key, value in load_file(path).items()}
    for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "one lacks, others are left over": (lambda t: (t.pop(UP), t.update(extra=torch.zeros(9999))), f"lacks {UP}"),
    "one has another shape": (lambda t: t.update({UP: torch.zeros(3, 5)}), f"has {UP} of shape \\(3, 5\\), and its config gives"),
    "one is turned": (lambda t: t.update({UP: t[UP].T.contiguous()}), f"has {UP} of shape"),
    "a bias too many": (lambda t: t.update({UP.replace("weight", "bias"): torch.zeros(len(t[UP]))}), "does not have"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_the_models_are_found_without_loading_any(
    case: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = TENSORS[case]
    rewrite(copy, change)
    with pytest.raises(ModelError, match=words):
        parameter_count(str(copy))
    monkeypatch.setattr("opd.models.load.load_complete", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=words):
        load_model(str(copy))


def test_experts_that_lack_one_of_them_are_found_without_loading_any(tmp_path: Path) -> None:
    """transformers joins them to one tensor, so none of the names that are missing is the model's."""
    family = family_named("Qwen3-MoE")
    family.build().save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    assert parameter_count(str(tmp_path / "m")) > 0
    rewrite(tmp_path / "m", lambda tensors: tensors.pop("model.layers.0.mlp.experts.1.down_proj.weight"))
    with pytest.raises(ModelError, match=r"experts.down_proj|cannot be joined"):
        parameter_count(str(tmp_path / "m"))


def test_a_header_whose_shape_is_not_its_bytes_is_rejected(copy: Path) -> None:
    path = shard(copy)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(key for key, entry in header.items() if key != "__metadata__" and len(entry["shape"]) == 2)
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ModelError, match="does not match its shape"):
        parameter_count(str(copy))


# Adapters


@pytest.fixture
def adapter(copy: Path, tmp_path: Path) -> Path:
    """Of the model at `copy`."""
    model = load_model(str(copy), lora=Lora(rank=2))
    model.adapter.save_pretrained(tmp_path / "a")
    edit(tmp_path / "a" / "adapter_config.json", base_model_name_or_path=str(copy))
    return tmp_path / "a"


FACTOR = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
FACTORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "one lacks": (lambda t: t.pop(FACTOR), f"lacks {FACTOR}"),
    "one is of another layer": (lambda t: t.update({FACTOR.replace(".0.", ".7."): t[FACTOR].clone()}), "does not have"),
    "one has another shape": (lambda t: t.update({FACTOR: torch.zeros(7, 2)}), "is \\(7, 2\\) and should be"),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTORS)
def test_an_incomplete_adapter_is_rejected_without_loading_its_base(case: str, adapter: Path) -> None:
    assert parameter_count(str(adapter)) > 0
    load_model(str(adapter))
    change, words = FACTORS[case]
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    for load in (parameter_count, load_model):
        with pytest.raises(ModelError, match=words):
            load(str(adapter))


def test_a_checkpoint_with_an_incomplete_adapter_is_not_restored(copy: Path, tmp_path: Path) -> None:
    model = load_model(str(copy), lora=Lora(rank=2))
    model.save(tmp_path / "saved")
    model.restore(tmp_path / "saved")
    file = tmp_path / "saved" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[FACTOR]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{FACTOR} is only in one"):
        model.restore(tmp_path / "saved")


def test_a_truncated_adapter_is_rejected_without_loading_its_base(adapter: Path) -> None:
    cut(adapter / "adapter_model.safetensors", 0.9)
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is truncated"):
        parameter_count(str(adapter))


# Mutations by the hundred


def mutate(directory: Path, generator: random.Random) -> None:
    """One file: bytes flipped, cut, or a value of its JSON exchanged for an odd one."""
    path = generator.choice([p for p in sorted(directory.iterdir()) if p.suffix in (".json", ".safetensors")])
    data = path.read_bytes()
    how = generator.choice(["flip", "cut", "value", "value", "value"])
    if how == "value" and path.suffix == ".json":
        value = json.loads(data)
        odd = [None, -1, 0, 1, 7, 10**9, 10**30, 1e308, float("nan"), "", "x", [], {}, [[1]], True, "../x", "\ud800"]
        holder: Any = value
        while isinstance(holder, (dict, list)) and holder:
            key = generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not isinstance(holder[key], (dict, list)) or not holder[key] or generator.random() < 0.2:
                break
            holder = holder[key]
        if isinstance(holder, (dict, list)) and holder:
            if isinstance(holder, dict) and generator.random() < 0.2:
                del holder[key]
            else:
                holder[key] = generator.choice(odd)
        path.write_text(json.dumps(value))
    elif how == "cut":
        path.write_bytes(data[: generator.randrange(len(data))])
    else:
        changed = bytearray(data)
        for _ in range(generator.randint(1, 8)):
            changed[generator.randrange(min(len(changed), 2000))] = generator.randrange(256)
        path.write_bytes(bytes(changed))


def fuzz(whole: Path, directory: Path, trials: range, seed: int) -> int:
    """How many were rejected; the others loaded."""
    refused = 0
    for trial in trials:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(whole, directory)
        mutate(directory, random.Random(seed * 100_000 + trial))
        try:
            parameter_count(str(directory))
            model = load_model(str(directory))
            with torch.no_grad():
                model.tokenizer("1+1=")
        except ModelError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, trial {trial}") from error
    return refused


def test_mutated_directories_load_or_are_rejected(whole: Path, tmp_path: Path) -> None:
    assert 0 < fuzz(whole, tmp_path / "m", range(20), seed=0) < 20


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(8))
def test_hundreds_of_mutated_directories_load_or_are_rejected(whole: Path, tmp_path: Path, part: int) -> None:
    trials = range(part, FUZZED, 8)
    assert 0 < fuzz(whole, tmp_path / "m", trials, seed=1) < len(trials) or len(trials) < 20

"""What is refused before weights are read: the models here have none that could be."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from lora_serve.engine.frontend import startup_checks
from lora_serve.engine.frontend.startup_checks import check_startup
from lora_serve.engine.settings import engine_config
from lora_serve.errors import AdapterFormatError, ConfigError, LoraServeError
from lora_serve.ops.cpu.threads import default_num_threads
from tests.fakes.peft_adapters import make_peft


@pytest.fixture
def model(model_path: Path, tmp_path: Path) -> Path:
    """A model's directory without its weights."""
    copy = tmp_path / "model"
    shutil.copytree(model_path, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def refusal(model: Path, **settings: object) -> str:
    with pytest.raises(LoraServeError) as caught:
        check_startup(engine_config(model=str(model), **settings))
    return str(caught.value)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_can_be_served_passes_without_its_weights(
    model: Path, adapter_paths: list[Path], tmp_path: Path
) -> None:
    modules = tuple(f"{path.name}={path}" for path in adapter_paths)
    check_startup(
        engine_config(
            model=str(model),
            enable_lora=True,
            lora_modules=modules,
            kv_disk_path=str(tmp_path / "kv"),
            override_op=("paged_attention=reference",),
        )
    )


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "neither a directory nor a hub id" in refusal(tmp_path / "nothing")


def test_an_architecture_that_is_not_served_is_refused(model: Path) -> None:
    edit(model / "config.json", architectures=["T5ForConditionalGeneration"])
    assert "architecture T5ForConditionalGeneration is not among those" in refusal(model)


def test_a_dtype_and_a_length_that_the_model_does_not_have_are_refused_together(
    model: Path,
) -> None:
    edit(model / "config.json", dtype="float8_e4m3fn", torch_dtype="float8_e4m3fn")
    dtype, length = refusal(model, max_model_len=10**6).splitlines()
    assert "float8_e4m3fn is not supported; set --dtype" in dtype
    assert "--max-model-len 1000000 is above the" in length


def test_more_ranks_than_cores_and_heads_are_refused(model: Path) -> None:
    heads, cores = refusal(model, tensor_parallel_size=10_000).splitlines()
    assert f"--tensor-parallel-size 10000 is above the {default_num_threads()} cores" in cores
    assert "--tensor-parallel-size 10000 is above the model's" in heads


def test_more_ranks_than_cards_are_refused_with_both_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = refusal(model, device="cuda", tensor_parallel_size=2)
    assert told.startswith("--tensor-parallel-size 2 is above the 1 GPU that torch sees")
    assert "\n" not in told


def test_ranks_on_cpus_do_not_meet_by_nccl(model: Path) -> None:
    told = refusal(model, tensor_parallel_size=2, tensor_parallel_backend="nccl")
    assert "--tensor-parallel-backend nccl is between GPUs" in told


def test_embeddings_of_more_dimensions_than_the_model_has_are_refused(model: Path) -> None:
    told = refusal(model, pooler_config='{"dimensions": 100000}')
    assert told.startswith("--pooler-config: dimensions 100000 is above")


def test_a_method_of_quantisation_that_is_not_the_checkpoints_is_refused(model: Path) -> None:
    assert f"--quantization gptq: the weights of {model} are" in refusal(model, quantization="gptq")


@pytest.fixture
def draft_model(model: Path, tmp_path: Path) -> Path:
    """The same model in another directory."""
    return shutil.copytree(model, tmp_path / "draft")


def draft_refusal(model: Path, draft_model: Path) -> str:
    return refusal(model, speculative_config={"model": str(draft_model)})


def test_a_draft_model_of_the_same_tokens_passes_without_its_weights(
    model: Path, draft_model: Path
) -> None:
    check_startup(engine_config(model=str(model), speculative_config={"model": str(draft_model)}))


def test_a_draft_model_that_is_not_there_or_is_not_served_is_refused(
    model: Path, draft_model: Path, tmp_path: Path
) -> None:
    told = draft_refusal(model, tmp_path / "nothing")
    assert told.startswith("--speculative-config: the draft model: model ")
    assert "neither a directory nor a hub id" in told
    edit(draft_model / "config.json", architectures=["T5ForConditionalGeneration"])
    told = draft_refusal(model, draft_model)
    assert told.startswith("--speculative-config: the draft model: ")
    assert "architecture T5ForConditionalGeneration is not among those" in told


def test_a_draft_model_of_other_tokens_is_refused(model: Path, draft_model: Path) -> None:
    tokenizer = draft_model / "tokenizer.json"
    stored = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(stored))  # other bytes, and the same tokens
    check_startup(engine_config(model=str(model), speculative_config={"model": str(draft_model)}))
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    edit(tokenizer, model=stored["model"])
    assert "has other tokens than that of" in draft_refusal(model, draft_model)
    edit(draft_model / "config.json", vocab_size=7)
    assert "has a vocabulary of 7 tokens, and the model that is served one of" in draft_refusal(
        model, draft_model
    )


def test_a_draft_model_that_no_memory_holds_is_refused(model: Path, draft_model: Path) -> None:
    edit(draft_model / "config.json", intermediate_size=2**31 - 1, num_hidden_layers=100)
    assert "bytes at least, and" in draft_refusal(model, draft_model)


def test_a_library_of_grammars_that_is_not_installed_is_refused_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = refusal(model, structured_outputs_backend="xgrammar")
    assert told == (
        "--structured-outputs-config.backend xgrammar needs the library xgrammar: "
        "pip install 'lora-serve[xgrammar]'"
    )


def test_a_model_without_a_tokenizer_is_refused_unless_another_is_named(
    model: Path, model_path: Path
) -> None:
    (model / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refusal(model)
    check_startup(engine_config(model=str(model), tokenizer=str(model_path)))


def test_a_directory_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    told = refusal(tmp_path)
    assert told.startswith(f"model {tmp_path}: this directory has no config.json")
    assert "\n" not in told


def test_an_adapter_that_is_not_there_is_refused_with_its_flag(model: Path, tmp_path: Path) -> None:
    told = refusal(model, enable_lora=True, lora_modules=(f"a={tmp_path / 'none'}",))
    assert told.startswith(f"--lora-modules a={tmp_path / 'none'}: No adapter found for")
    assert "adapter_config.json" in told


def test_a_place_in_which_no_adapter_could_be_found_is_refused(model: Path, tmp_path: Path) -> None:
    """An empty one is none of these: adapters may come."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = tuple(f"dir:{tmp_path / name}" for name in ("empty", "none", "file"))
    none, file = refusal(model, enable_lora=True, lora_resolver=places).splitlines()
    assert f"--lora-resolver {places[1]}: {tmp_path / 'none'} does not exist; make it" in none
    assert f"--lora-resolver {places[2]}: {tmp_path / 'file'} is no directory;" in file
    check_startup(engine_config(model=str(model), enable_lora=True, lora_resolver=places[:1]))


def test_an_adapter_on_a_disk_that_hangs_is_refused_in_one_line(
    model: Path, adapter_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are all of them: those after it may lie on the same disk, and would take as long."""
    answers = threading.Event()
    monkeypatch.setattr(startup_checks, "check_adapter", lambda *_, **__: answers.wait())
    modules = tuple(f"{path.name}={path}" for path in adapter_paths)
    told = refusal(model, enable_lora=True, lora_modules=modules, lora_load_timeout=0.1)
    answers.set()
    assert told == (
        f"--lora-modules {modules[0]} was not read within --lora-load-timeout 0.1; see that its "
        "disk or hub answers, or raise the limit"
    )


def test_an_adapter_that_is_long_on_its_way_is_refused_by_the_limit_of_downloads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(startup_checks, "download_from_hub", lambda *_: answers.wait())
    told = refusal(
        model, enable_lora=True, lora_modules=("a=org/adapter",), lora_download_timeout=0.1
    )
    answers.set()
    assert told.startswith("--lora-modules a=org/adapter was not read within")
    assert "--lora-download-timeout 0.1" in told


def test_an_adapter_above_the_highest_rank_is_refused(
    model: Path, adapter_paths: list[Path]
) -> None:
    modules = tuple(f"{path.name}={path}" for path in adapter_paths)
    told = refusal(model, enable_lora=True, lora_modules=modules, max_lora_rank=8)
    assert told.startswith(f"{adapter_paths[2]}: LoRA rank 16 is greater than max_lora_rank 8")


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    make_peft("mistral", 0, r=4).save_pretrained(str(tmp_path / "other"))
    edit(model / "config.json", hidden_size=128, head_dim=32)
    with pytest.raises(AdapterFormatError, match="shapes that do not fit this model"):
        check_startup(
            engine_config(
                model=str(model), enable_lora=True, lora_modules=(f"a={tmp_path / 'other'}",)
            )
        )


def test_an_adapters_config_is_checked_though_the_model_is_refused(
    tmp_path: Path, adapter_paths: list[Path]
) -> None:
    shutil.copytree(adapter_paths[0], tmp_path / "dora")
    edit(tmp_path / "dora" / "adapter_config.json", use_dora=True)
    told = refusal(tmp_path / "nothing", enable_lora=True, lora_modules=(f"a={tmp_path / 'dora'}",))
    assert [("hub id" in line, "DoRA" in line) for line in told.splitlines()] == [
        (True, False),
        (False, True),
    ]


def test_a_tier_that_cannot_be_is_refused(model: Path) -> None:
    told = refusal(model, kv_disk_path="/proc/kv", kv_redis_url="http://host")
    assert [line.split(" ")[0].rstrip(":") for line in told.splitlines()] == [
        "--kv-disk-path",
        "--kv-redis-url",
    ]


def test_all_that_is_wrong_is_one_error(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_startup(
            engine_config(
                model=str(model),
                enable_lora=True,
                lora_modules=("a=/none", "b=/none"),
                max_model_len=10**6,
                kv_disk_path="/proc/kv",
            )
        )
    assert len(str(caught.value).splitlines()) == 4

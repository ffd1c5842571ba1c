"""Models that transformers' own modules compute, with our attention, linear layers and LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lora_serve.config.model import AUTO, OWN_IMPL, TRANSFORMERS_IMPL, ModelConfig
from lora_serve.config.parallel import WHOLE_ROWS, Reduce
from lora_serve.errors import ConfigError
from lora_serve.models.registry import read_spec
from lora_serve.models.source import load_spec
from lora_serve.models.transformers_backend import reading, row_operations
from lora_serve.models.transformers_backend.row_operations import RowOperations
from lora_serve.ops.select import available_ops
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.loaded_model import load_model
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import read_saved
from tests.fakes.quantized_checkpoints import save_mxfp4
from tests.fakes.text_architectures import architectures, tiny_config, tiny_model

# Rotary positions in a part of a head and layer norms; positions that are learned, and weights
# (in, out); a mixture of experts; one whose experts have biases, with sinks and windows.
FEW = ("stablelm", "gpt2", "ernie4_5_moe", "gpt_oss")
FASTEST = list(available_ops().values())[-1]
RECORD = Path(__file__).parents[2] / "benchmarks/results/model_impl.json"


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: tiny_model(name) for name in FEW}


@pytest.fixture(scope="module")
def paths(
    models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in FEW}
    for name, path in found.items():
        models[name].save_pretrained(path)
    return found


@pytest.fixture(scope="module")
def served(paths: dict[str, Path]) -> dict[str, BareModel]:
    """The models in float32."""
    return {
        name: BareModel(path, FASTEST, torch.float32, model_impl=TRANSFORMERS_IMPL)
        for name, path in paths.items()
    }


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (count,), generator=generator).tolist()


def logits_of(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FEW)
def test_logits_are_those_of_transformers(
    models: dict[str, PreTrainedModel], served: dict[str, BareModel], name: str
) -> None:
    token_ids = tokens(60)
    got = Prompt(token_ids, range(9, 3, -1)).alone(served[name])
    assert_near(got, logits_of(models[name], token_ids))


@pytest.mark.parametrize("name", [*FEW, "ernie4_5_moe in bfloat16"])
def test_company_chunks_and_cached_prefixes_change_no_bit(
    paths: dict[str, Path], served: dict[str, BareModel], name: str
) -> None:
    rounded = BareModel(paths["ernie4_5_moe"], FASTEST, torch.bfloat16) if " in " in name else None
    model = rounded or served[name]
    prompt, other = Prompt(tokens(53), [7, 3, 30, 2]), Prompt(tokens(41, seed=1), [12, 13, 14])
    whole, of_other = prompt.alone(model), other.alone(model)
    assert torch.isfinite(whole).all()
    assert torch.equal(prompt.alone(model, chunk=7), whole)
    sharer = Prompt(prompt.token_ids, [7, 3, 11, 15])  # has the first two blocks from the cache
    mixed = model.step([other.chunk(0, 40), sharer.chunk(32, 53)])
    assert torch.equal(mixed[0], of_other[:40])
    assert torch.equal(mixed[1], whole[32:])
    decoded = model.step([sharer.chunk(52, 53), other.chunk(40, 41)])
    assert torch.equal(decoded[0], whole[52:])
    assert torch.equal(decoded[1], of_other[40:])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("name", "targets", "fan_in_fan_out"),
    [
        ("stablelm", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], False),
        ("gpt2", ["c_attn", "c_proj", "c_fc"], True),
    ],
)
def test_adapters_are_pefts_and_change_no_bit_of_others(
    models: dict[str, PreTrainedModel],
    served: dict[str, BareModel],
    tmp_path: Path,
    name: str,
    targets: list[str],
    fan_in_fan_out: bool,
) -> None:
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=fan_in_fan_out)
    adapted: Any = get_peft_model(tiny_model(name), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model = served[name]
    adapter = model.add_adapter(read_saved(adapted, tmp_path, model.spec))
    base = Prompt(tokens(30, seed=2), [20, 21])
    prompt = Prompt(tokens(40), range(4, 8), adapter)
    alone, of_base = prompt.alone(model), base.alone(model)
    assert_near(alone, logits_of(adapted, prompt.token_ids))
    assert not torch.allclose(alone, logits_of(models[name], prompt.token_ids), atol=1e-2)
    model.poison()
    mixed = model.step([base.chunk(0, 30), prompt.chunk(0, 40)])
    assert torch.equal(mixed[0], of_base)
    assert torch.equal(mixed[1], alone)


@pytest.mark.parametrize("impl", [OWN_IMPL, TRANSFORMERS_IMPL])
def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path, impl: str) -> None:
    model = tiny_model("gpt_oss")
    model.load_state_dict(save_mxfp4(model, tmp_path / "model"))
    prompt = Prompt(tokens(60), range(4))
    keeps_codes = impl == OWN_IMPL and FASTEST.pack_codes is not None
    ours = BareModel(
        tmp_path / "model", FASTEST, torch.float32, model_impl=impl, keeps_codes=keeps_codes
    )
    assert set(ours.kept_codes.values()) == ({"MXFP4"} if keeps_codes else set())
    assert_near(prompt.alone(ours), logits_of(model, prompt.token_ids))


def test_a_family_of_our_own_gives_the_same_through_either_door(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    prompt = Prompt(tokens(40), range(3))
    ours, theirs = (
        prompt.alone(BareModel(tmp_path, FASTEST, torch.float32, model_impl=impl))
        for impl in (OWN_IMPL, TRANSFORMERS_IMPL)
    )
    assert_near(theirs, ours)
    assert load_spec(tmp_path, AUTO).facts() == load_spec(tmp_path, AUTO, OWN_IMPL).facts()


@torch.inference_mode()
def test_a_worker_loads_it_like_any_model_also_with_quantised_weights(
    paths: dict[str, Path],
) -> None:
    path = str(paths["stablelm"])
    loaded = [
        load_model(ModelConfig(model=path, quantization=how), CpuDevice(), 16)
        for how in (None, "int8")
    ]
    assert loaded[0].fingerprint != loaded[1].fingerprint
    hidden = torch.randn(3, loaded[0].spec.hidden_size)
    logits, of_codes = (each.model.logits(hidden) for each in loaded)
    assert not torch.equal(logits, of_codes)
    torch.testing.assert_close(of_codes, logits, rtol=0.05, atol=0.05 * float(logits.abs().max()))


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("mamba", {}, "its layers of linear_attention carry a recurrent state from token to token"),
        ("rwkv", {"max_position_embeddings": 99}, "its layers carry a recurrent state"),
        ("lfm3", {}, "its layers of conv carry a recurrent state"),
        ("falcon_h1", {}, "its layers of hybrid carry a recurrent state"),
        ("deepseek_v32", {}, "its layers of indexed_attention attend to tokens that they choose"),
        ("bloom", {}, "ALiBi's biases"),
        ("falcon", {"alibi": True}, "ALiBi's biases"),
        ("falcon", {"alibi": False}, "its attention takes no other implementation"),
        ("bart", {}, "cross attention to an encoder's output"),
        ("gpt2", {"add_cross_attention": True}, "cross attention to an encoder's output"),
        ("bert", {"is_decoder": False}, "causal"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    model_type: str, changes: dict[str, Any], told: str
) -> None:
    config = json.loads(tiny_config(model_type).to_json_string(use_diff=False))
    name = architectures()[model_type]
    with pytest.raises(ConfigError, match=f"{name} cannot be served.*{told}"):
        read_spec({**config, "architectures": [name], **changes}, "c.json")


def test_a_config_gets_no_more_memory_than_honest_ones_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers makes a list, or a module, of as many as a config says, under many keys."""
    monkeypatch.setattr(reading, "_MOST_BYTES", 2**25)
    config = json.loads(tiny_config("stablelm").to_json_string(use_diff=False))
    config |= {"architectures": ["StableLmForCausalLM"], "max_position_embeddings": 10**12}
    with pytest.raises(ConfigError) as told:
        read_spec({**config, "num_labels": 10**6}, "c.json")
    assert "takes more than 33554432 bytes of memory" in str(told.value)
    with pytest.raises(ConfigError, match=r"must be from 1 to \d+, is 1000000000000"):
        read_spec(config, "c.json")


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    with pytest.raises(ConfigError, match="no model_type 'own', and code of checkpoints is never"):
        read_spec(config, "c.json")


def test_only_our_own_families_are_served_where_that_is_asked_for(paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"StableLmForCausalLM.*by --model-impl lora_serve"):
        load_spec(paths["stablelm"], AUTO, OWN_IMPL)


def test_its_modules_are_not_divided_among_ranks(paths: dict[str, Path]) -> None:
    spec = load_spec(paths["stablelm"])
    assert spec.divided(1, WHOLE_ROWS) is spec
    with pytest.raises(ConfigError, match="StableLmForCausalLM is run by transformers' modules"):
        spec.divided(2, WHOLE_ROWS)
    told = r"^--tensor-parallel-reduce segments: StableLmForCausalLM .* whose sums are whole"
    with pytest.raises(ConfigError, match=told):
        spec.divided(1, Reduce("segments", 8))


def test_a_module_that_looks_at_other_tokens_is_refused(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some architectures shift tokens. Each operation is known; a trial of rows shows it."""
    from transformers.models.stablelm import modeling_stablelm as stablelm

    plain = stablelm.StableLmMLP.forward

    def shifted(self: Any, x: Tensor) -> Any:
        return plain(self, torch.cat((x[:, :1], x[:, :-1]), dim=1))

    monkeypatch.setattr(stablelm.StableLmMLP, "forward", shifted)
    with pytest.raises(ConfigError, match="a token from others of the batch"):
        BareModel(paths["stablelm"], FASTEST, torch.float32)


@pytest.mark.parametrize("most_rows_apart", [1, 8])
def test_an_operation_that_looks_at_a_neighbour_is_found(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, most_rows_apart: int
) -> None:
    """A trial of a few rows finds it at load; or, if it keeps these apart, prompts in chunks do."""
    plain = row_operations._elementwise

    def mixed(*call: Any) -> Tensor:
        rows = plain(*call)
        looks_on = rows.ndim > 1 and rows.shape[-2] > most_rows_apart
        return rows + 1e-3 * rows.roll(1, -2) if looks_on else rows

    monkeypatch.setattr(row_operations, "_elementwise", mixed)
    if most_rows_apart == 1:
        with pytest.raises(ConfigError, match="a token from others of the batch"):
            BareModel(paths["stablelm"], FASTEST, torch.float32)
        return
    model, prompt = BareModel(paths["stablelm"], FASTEST, torch.float32), Prompt(tokens(30), [1, 2])
    assert not torch.equal(prompt.alone(model, chunk=7), prompt.alone(model))


def test_ranks_are_refused_by_the_flag_and_the_reason(paths: dict[str, Path]) -> None:
    spec = load_spec(paths["stablelm"])
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 2: StableLmForCausalLM is run by"
    ):
        spec.divided(2, WHOLE_ROWS)


@pytest.mark.parametrize(
    ("model_type", "changes", "is_other_able"),
    [
        ("cohere", {"hidden_act": "gelu"}, True),
        ("olmoe", {"hidden_act": "gelu"}, True),
        ("olmoe", {"hidden_act": "gelu", "model_type": None}, False),  # as a GGUF file's
        ("cohere", {"hidden_act": "gelu", "hidden_size": "64"}, False),
        ("cohere", {"hidden_act": "gelu", "quantization_config": {"quant_method": "x"}}, False),
    ],
)
def test_what_a_family_of_our_own_refuses_names_the_modules_that_can_run_it(
    model_type: str, changes: dict[str, Any], is_other_able: bool
) -> None:
    config = json.loads(tiny_config(model_type).to_json_string(use_diff=False))
    config |= {"architectures": [architectures()[model_type]], **changes}
    with pytest.raises(ConfigError) as refused:
        read_spec(config, "c.json")
    assert "is not supported" in str(refused.value)
    hint = "; --model-impl transformers can run it"
    assert str(refused.value).endswith(hint) == is_other_able


def test_vllms_word_for_its_own_models_is_ours_for_ours() -> None:
    assert ModelConfig(model_impl="vllm").model_impl == OWN_IMPL
    with pytest.raises(ConfigError, match="--model-impl terratorch must be one of auto"):
        ModelConfig(model_impl="terratorch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, 40, 129])
@torch.inference_mode()
def test_operations_between_kernels_give_a_row_the_bits_that_it_has_alone(
    width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(37, width, generator=generator).to(dtype)
    weight, bias = torch.randn(2, width, generator=generator).to(dtype)
    matrix = torch.randn(11, width, generator=generator).to(dtype)
    functions = (
        torch.exp, torch.tanh, torch.sigmoid, torch.rsqrt, torch.cos,
        nn.functional.silu, nn.functional.gelu, nn.functional.softplus,
        lambda x: x * 0.3 + x / 7, lambda x: x.abs().sqrt() - 1,
        lambda x: x.pow(1.7), lambda x: x.softmax(-1), lambda x: x.mean(-1, keepdim=True),
        lambda x: x.float().pow(2).sum(-1), lambda x: x.std(-1),
        lambda x: nn.functional.layer_norm(x, (width,), weight, bias),
        lambda x: nn.functional.rms_norm(x, (width,), weight),
        lambda x: x @ matrix.t(), lambda x: nn.functional.linear(x, matrix),
    )  # fmt: skip
    for at, function in enumerate(functions):
        with RowOperations():
            together = function(rows)
            alone = [function(rows[row : row + 1])[0] for row in (0, 17, 36)]
        torch.testing.assert_close(together, function(rows), equal_nan=True)
        of_company = together[[0, 17, 36]]
        assert torch.equal(torch.stack(alone).nan_to_num(), of_company.nan_to_num()), at


def test_the_record_names_sixty_architectures_that_give_the_logits_of_transformers() -> None:
    record = json.loads(RECORD.read_text())["architectures"]
    assert sum(each == "equal" for each in record.values()) >= 60
    assert set(FEW) <= {name for name, told in record.items() if told == "equal"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", architectures())
def test_every_architecture_does_what_the_record_says(model_type: str, tmp_path: Path) -> None:
    record = json.loads(RECORD.read_text())["architectures"]
    assert walked(model_type, tmp_path) == record[model_type]


def walked(model_type: str, path: Path) -> str:
    """What becomes of a tiny model with random weights: equal, or why it is not served."""
    try:
        tiny_model(model_type).save_pretrained(path)
        saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = logits_of(saved, tokens(40))
    except Exception as error:  # of transformers, which cannot run it with such a config
        return f"no tiny model of it was made ({type(error).__name__})"
    try:
        bare = BareModel(path, FASTEST, torch.float32, model_impl=TRANSFORMERS_IMPL)
    except ConfigError as error:
        return str(error).replace(f"{path}/config.json: ", "")
    assert_near(Prompt(tokens(40), range(9, 3, -1)).alone(bare), expected)
    return "equal"

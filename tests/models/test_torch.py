from __future__ import annotations

import dataclasses
import types
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.errors import InvalidOptionError, ModelError, UnknownNameError
from mlx_eval.models.layout import named_arrays
from mlx_eval.models.torch import convert_torch

from .tiny_transformers import CONFIGS, TOKENS, VOCAB, mlx_logits, tiny, torch_logits

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

LOGIT_TOLERANCE = 1e-4
"""Float32 rounding of two implementations, on logits of a few units; a wrong rotary base or an exchanged
matrix moves them by more than 0.01."""
SIZES = {"hidden": 32, "inner": 48, "layers": 3, "heads": 4, "kv_heads": 2}
NAME_MAP = {
    "tok.weight": "model.embed_tokens.weight",
    "blocks.{i}.attn.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blocks.{i}.attn.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blocks.{i}.attn.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blocks.{i}.attn.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blocks.{i}.ffn.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blocks.{i}.ffn.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blocks.{i}.ffn.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "blocks.{i}.norm1.gain": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.norm2.gain": "model.layers.{i}.post_attention_layernorm.weight",
    "norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


# --- a decoder with names of its own: the oracle ---------------------------------------------------


class HomeNorm(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(1 + 0.3 * torch.randn(size))

    def forward(self, x: Any) -> Any:
        return self.gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


class HomeAttention(torch.nn.Module):
    def __init__(self, *, neighbours: bool) -> None:
        super().__init__()
        size, self.heads, self.kv_heads = SIZES["hidden"], SIZES["heads"], SIZES["kv_heads"]
        self.head = size // self.heads
        self.neighbours = neighbours
        self.wq = torch.nn.Linear(size, size, bias=False)
        self.wk = torch.nn.Linear(size, self.kv_heads * self.head, bias=False)
        self.wv = torch.nn.Linear(size, self.kv_heads * self.head, bias=False)
        self.wo = torch.nn.Linear(size, size, bias=False)
        self.register_buffer("inv_freq", 800.0 ** (-torch.arange(0, self.head, 2) / self.head))

    def rotate(self, x: Any) -> Any:
        angle = torch.arange(x.shape[2])[:, None] * self.inv_freq[None]
        if self.neighbours:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, -1)
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        return torch.stack(turned, -1).flatten(-2) if self.neighbours else torch.cat(turned, -1)

    def forward(self, x: Any) -> Any:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.head).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, self.head).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, self.head).transpose(1, 2)
        group = self.heads // self.kv_heads
        q, k, v = self.rotate(q), self.rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / self.head**0.5  # [B, H, T, T]
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


class HomeFeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(SIZES["hidden"], SIZES["inner"], bias=False)
        self.up = torch.nn.Linear(SIZES["hidden"], SIZES["inner"], bias=False)
        self.down = torch.nn.Linear(SIZES["inner"], SIZES["hidden"], bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class HomeBlock(torch.nn.Module):
    def __init__(self, *, neighbours: bool) -> None:
        super().__init__()
        self.attn, self.ffn = HomeAttention(neighbours=neighbours), HomeFeedForward()
        self.norm1, self.norm2 = HomeNorm(SIZES["hidden"]), HomeNorm(SIZES["hidden"])

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class HomeLlama(torch.nn.Module):
    """A Llama that nobody at Hugging Face named."""

    def __init__(self, *, tied: bool = False, neighbours: bool = False, vocab: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tok = torch.nn.Embedding(vocab, SIZES["hidden"])
        self.blocks = torch.nn.ModuleList(HomeBlock(neighbours=neighbours) for _ in range(SIZES["layers"]))
        self.norm = HomeNorm(SIZES["hidden"])
        self.head = torch.nn.Linear(SIZES["hidden"], vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        self.register_buffer("causal_mask", torch.ones(8, 8).tril())

    def forward(self, ids: Any) -> Any:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return types.SimpleNamespace(logits=self.head(self.norm(x)))


@dataclasses.dataclass
class HomeConfig:
    hidden_size: int = SIZES["hidden"]
    intermediate_size: int = SIZES["inner"]
    num_hidden_layers: int = SIZES["layers"]
    num_attention_heads: int = SIZES["heads"]
    num_key_value_heads: int = SIZES["kv_heads"]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 800.0
    vocab_size: int = VOCAB


def home_config(**changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(HomeConfig()), **changes}


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    """A home-made state dict under Hugging Face's names, without what is no weight."""
    import re

    found = {}
    for name, tensor in state.items():
        general = re.sub(r"\.\d+\.", ".{i}.", name)
        if general in NAME_MAP:
            number = re.search(r"\.(\d+)\.", name)
            found[NAME_MAP[general].format(i=number[1] if number else "")] = tensor
    return found


def assert_same_logits(loaded: Any, model: Any) -> None:
    expected = torch_logits(model)
    assert np.abs(expected).max() > 0.5  # else anything would be within the tolerance
    np.testing.assert_allclose(mlx_logits(loaded.model), expected, rtol=0, atol=LOGIT_TOLERANCE)


# --- the same logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_home_made_llama_gives_the_same_logits(tied: bool) -> None:
    model = HomeLlama(tied=tied)
    loaded = convert_torch(model, HomeConfig(), name_map=NAME_MAP)
    assert_same_logits(loaded, model)
    assert loaded.source == "torch"
    assert loaded.config["model_type"] == "llama"
    assert loaded.config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in named_arrays(loaded.model)) is not tied


def test_rotary_embedding_of_neighbours() -> None:
    model = HomeLlama(neighbours=True)
    loaded = convert_torch(model, home_config(rope_traditional=True), name_map=NAME_MAP)
    assert_same_logits(loaded, model)


def test_name_map_as_a_function() -> None:
    model = HomeLlama()
    names = dict(zip(_own_names(model), renamed(model.state_dict()), strict=True))
    assert_same_logits(convert_torch(model, HomeConfig(), name_map=names.get), model)


def _own_names(model: Any) -> list[str]:
    return [name for name in model.state_dict() if "inv_freq" not in name and name != "causal_mask"]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_transformers_model_gives_the_same_logits(name: str) -> None:
    model = tiny(name)
    assert_same_logits(convert_torch(model, model.config), model)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt_neox"])
def test_state_dict_alone(name: str) -> None:
    model = tiny(name)
    assert_same_logits(convert_torch(model.state_dict(), model.config.to_dict()), model)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3_text", "gpt2"])
def test_state_dict_without_the_base_prefix(name: str) -> None:
    model = tiny(name)
    assert_same_logits(convert_torch(model.base_model.state_dict(), model.config), model)


def test_tied_neox_is_given_a_head() -> None:
    model = tiny("gpt_neox", tie_word_embeddings=True)
    loaded = convert_torch(model, model.config)
    assert_same_logits(loaded, model)
    assert_same_logits(convert_torch(model.base_model, model.config), model)
    assert loaded.config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
        lambda name: f"net.{name}",
    ],
    ids=["data-parallel", "compiled", "both", "compiled-layer", "part-of-another"],
)
def test_wrapped_names(wrap: Any) -> None:
    model = tiny("llama")
    state = {wrap(name): tensor for name, tensor in model.state_dict().items()}
    assert_same_logits(convert_torch(state, model.config), model)


def test_wrapped_home_made_names() -> None:
    model = HomeLlama()
    state = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    assert_same_logits(convert_torch(state, HomeConfig(), name_map=NAME_MAP), model)


@pytest.mark.parametrize("kind", ["dict", "namespace", "dataclass"])
def test_kinds_of_configuration(kind: str) -> None:
    model = HomeLlama()
    config = {
        "dict": home_config(),
        "namespace": types.SimpleNamespace(**home_config(), dropout=torch.nn.Dropout()),
        "dataclass": HomeConfig(),
    }[kind]
    assert_same_logits(convert_torch(model, config, name_map=NAME_MAP), model)


# --- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_copied_bit_by_bit(dtype: str) -> None:
    model = HomeLlama().to(getattr(torch, dtype))
    loaded = convert_torch(model, HomeConfig(), name_map=NAME_MAP, dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.config["torch_dtype"] == dtype
    arrays = named_arrays(loaded.model)
    expected = renamed(model.state_dict())
    assert arrays.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = torch.int32 if dtype == "float32" else torch.int16
        words = mx.int32 if dtype == "float32" else mx.int16
        assert np.array_equal(np.array(arrays[name].view(words)), tensor.detach().view(bits).numpy()), name


def test_default_type_on_the_cpu_is_float32(on_cpu: None) -> None:
    model = HomeLlama().to(torch.bfloat16)
    loaded = convert_torch(model, HomeConfig(), name_map=NAME_MAP)
    assert loaded.dtype == "float32"
    assert loaded.config["torch_dtype"] == "float32"
    wide = model.tok.weight.detach().float().numpy()
    assert np.array_equal(np.array(named_arrays(loaded.model)["model.embed_tokens.weight"]), wide)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_eval.models import precision, runtime

    monkeypatch.setattr(precision, "device", lambda: runtime.Device("chip", "cpu", 1, "os", "blas"))


def test_one_copy_beside_the_torch_model(on_cpu: None) -> None:
    torch.manual_seed(2)
    state = {
        name: torch.randn(tensor.shape[0], *[512 for _ in tensor.shape[1:]], dtype=torch.bfloat16)
        for name, tensor in renamed(HomeLlama().state_dict()).items()
    }
    config = home_config(hidden_size=512, intermediate_size=512)
    for name, tensor in list(state.items()):
        rows = 256 if "k_proj" in name or "v_proj" in name else 512
        rows = VOCAB if "embed" in name or "head" in name else rows
        state[name] = torch.randn(rows, *tensor.shape[1:], dtype=torch.bfloat16)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = convert_torch(state, config)
    largest = max(array.nbytes for array in named_arrays(loaded.model).values())
    # bfloat16 grows to float32 one tensor at a time: never the model in both
    assert mx.get_peak_memory() - start < loaded.num_bytes + 2 * largest
    assert loaded.num_bytes > 10 * largest


def test_float64_becomes_float32() -> None:
    model = HomeLlama().double()
    loaded = convert_torch(model, HomeConfig(), name_map=NAME_MAP, dtype="auto")
    assert loaded.dtype == "float32"


def test_later_changes_do_not_reach_the_copy() -> None:
    model = HomeLlama()
    loaded = convert_torch(model, HomeConfig(), name_map=NAME_MAP)
    before = mlx_logits(loaded.model)
    with torch.no_grad():
        model.tok.weight.zero_()
    assert np.array_equal(mlx_logits(loaded.model), before)


def test_tensors_that_are_not_contiguous() -> None:
    model = HomeLlama()
    state = {name: tensor.t().contiguous().t() for name, tensor in renamed(model.state_dict()).items()}
    assert not state["lm_head.weight"].is_contiguous()
    assert_same_logits(convert_torch(state, HomeConfig()), model)


# --- tied or not -----------------------------------------------------------------------------------


def test_equal_copies_count_as_tied() -> None:
    model = HomeLlama(tied=True)
    state = {name: tensor.clone() for name, tensor in renamed(model.state_dict()).items()}
    assert convert_torch(state, HomeConfig()).config["tie_word_embeddings"] is True


def test_configured_as_untied_stays_untied() -> None:
    model = HomeLlama(tied=True)
    loaded = convert_torch(model, home_config(tie_word_embeddings=False), name_map=NAME_MAP)
    assert_same_logits(loaded, model)
    assert loaded.config["tie_word_embeddings"] is False


def test_tied_by_configuration_but_not_by_weights_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        convert_torch(HomeLlama(), home_config(tie_word_embeddings=True), name_map=NAME_MAP)


def test_own_head_where_mlx_lm_has_none_is_refused() -> None:
    model = tiny("gpt2", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        convert_torch(model, model.config)


def test_untied_without_head_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ModelError, match=r"missing lm_head\.weight; give the model with its head"):
        convert_torch(model.base_model, model.config)


# --- what is refused -------------------------------------------------------------------------------


def test_own_names_without_a_map_hint_at_it() -> None:
    with pytest.raises(ModelError) as caught:
        convert_torch(HomeLlama(), HomeConfig())
    message = str(caught.value)
    assert "\n" not in message
    assert "tok.weight" in message
    assert "and 27 more" in message  # of 30 weights without a place, three are named
    assert "and 26 more" in message  # of 29 that are missing: no head makes a tied model
    assert "name_map" in message
    assert "mask" not in message


def test_nearest_name_is_given() -> None:
    state = renamed(HomeLlama().state_dict())
    state["model.layers.1.self_attn.q_projection.weight"] = state.pop(
        "model.layers.1.self_attn.q_proj.weight"
    )
    with pytest.raises(
        ModelError,
        match=r"'model\.layers\.1\.self_attn\.q_projection\.weight': 'model\.layers\.1\.self_attn\.q_proj",
    ):
        convert_torch(state, HomeConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 32)}, "split fused"),
        (lambda s: s | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}, "merge"),
        (lambda s: s | {"model.layers.0.mlp.up_proj.weight.absmax": torch.zeros(4)}, "without quantisation"),
        (lambda s: s | {"model.layers.0.extra.weight": torch.zeros(4)}, r"no place .*layers\.0\.extra"),
        (
            lambda s: s | {"model.layers.3.mlp.up_proj.weight": torch.zeros(48, 32)},
            "correct the configuration",
        ),
        (
            lambda s: {name: tensor for name, tensor in s.items() if "norm" not in name},
            r"missing .*layernorm.* and 4 more",
        ),
        (
            lambda s: s | {"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 48)},
            r"up_proj\.weight is \(32, 48\), not \(48, 32\); transpose",
        ),
        (lambda s: s | {"model.norm.weight": torch.zeros(31)}, r"is \(31,\), not \(32,\); correct"),
        (
            lambda s: s | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)},
            "whole numbers",
        ),
        (
            lambda s: s | {"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)},
            r"model\.norm\.weight is a torch\.float8_e4m3fn tensor",
        ),
        (lambda s: s | {"model.norm.weight": torch.zeros(32, device="meta")}, "meta device"),
        (lambda s: {"model": s, "optimizer": {}}, "whole checkpoint"),
        (lambda s: {}, "no tensors"),
        (lambda s: [1], "this is a list"),
    ],
)
def test_refused_state_dicts(change: Any, message: str) -> None:
    state = renamed(HomeLlama().state_dict())
    with pytest.raises(ModelError, match=message):
        convert_torch(change(state), HomeConfig())


def test_named_masks_and_whole_numbers_are_left_out_of_a_state_dict() -> None:
    model = HomeLlama()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.bias_mask": torch.ones(8, 8),
        "model.layers.0.self_attn.steps": torch.tensor(3),
    }
    assert_same_logits(convert_torch(renamed(model.state_dict()) | extra, HomeConfig()), model)


def test_buffer_of_a_module_is_left_out_whatever_its_name() -> None:
    model = HomeLlama()
    model.register_buffer("statistics", torch.ones(3))
    assert_same_logits(convert_torch(model, HomeConfig(), name_map=NAME_MAP), model)
    with pytest.raises(ModelError, match="statistics"):
        convert_torch(model.state_dict(), HomeConfig(), name_map=NAME_MAP)
    assert_same_logits(
        convert_torch(model.state_dict(), HomeConfig(), name_map={**NAME_MAP, "statistics": None}), model
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (home_config(model_type="no_such_thing"), "no_such_thing"),
        ({"vocab_size": 300}, "hidden_size"),
        (home_config(hidden_act="gelu"), "hidden_act='gelu'"),
        (17, "config is a int"),
    ],
)
def test_refused_configurations(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        convert_torch(HomeLlama(), config, name_map=NAME_MAP)


def test_refused_name_maps() -> None:
    model = HomeLlama()
    with pytest.raises(InvalidOptionError, match=r"\{j\}, which 'blocks\.\{i\}\.a' lacks"):
        convert_torch(model, HomeConfig(), name_map={"blocks.{i}.a": "model.layers.{j}.b"})
    both = {**NAME_MAP, "head.weight": "model.embed_tokens.weight"}
    with pytest.raises(ModelError, match=r"tok\.weight and head\.weight would both become"):
        convert_torch(model, HomeConfig(), name_map=both)


def test_unknown_dtype() -> None:
    with pytest.raises(UnknownNameError, match="bfloat16"):
        convert_torch(HomeLlama(), HomeConfig(), name_map=NAME_MAP, dtype="bfloat61")


# --- tokenizers ------------------------------------------------------------------------------------


def test_bytes_are_the_default_tokenizer() -> None:
    loaded = convert_torch(HomeLlama(), home_config(eos_token_id=257), name_map=NAME_MAP)
    assert loaded.tokenizer.encode("né") == list("né".encode())
    assert 257 in loaded.tokenizer.eos_token_ids


def test_small_vocabulary_needs_a_tokenizer() -> None:
    with pytest.raises(ModelError, match="vocab_size is 100, too small for bytes"):
        convert_torch(HomeLlama(vocab=100), home_config(vocab_size=100), name_map=NAME_MAP)


def test_given_tokenizer(tmp_path: Any) -> None:
    from mlx_eval.models.bytes import byte_tokenizer

    tokenizer = byte_tokenizer(eos_token_id=259)
    loaded = convert_torch(HomeLlama(), HomeConfig(), name_map=NAME_MAP, tokenizer=tokenizer)
    assert loaded.tokenizer.eos_token_ids == {259}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = convert_torch(HomeLlama(), HomeConfig(), name_map=NAME_MAP, tokenizer=str(tmp_path))
    assert loaded.tokenizer.eos_token_ids == {259}
    with pytest.raises(ModelError, match="no such directory"):
        convert_torch(HomeLlama(), HomeConfig(), name_map=NAME_MAP, tokenizer=str(tmp_path / "none"))


def test_pytorch_is_not_imported_by_us() -> None:
    import subprocess
    import sys

    code = (
        "import sys, mlx_eval.models.torch, mlx_eval.models.save; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'mlx_lm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokens_are_within_the_vocabulary() -> None:
    assert TOKENS.max() < VOCAB

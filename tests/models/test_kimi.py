"""Kimi-Linear and Ling-3.0: their layers, what config.json may say, and a checkpoint in NumPy.

Nothing of the loader's table of tensors is used to compute the expected logits: they come from the
published tensors by name, token by token in float64.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxattn.models.blocks import KDA, MLA, MLP, MoE
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.registry import read_model

HIDDEN, HEADS, DIM, RANK, ROPE, VOCAB = 32, 2, 8, 16, 4, 40
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": DIM,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
KIMI = SHARED | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 6,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "model_max_length": 64,
    "mla_use_nope": True,
    "linear_attn_config": {
        "num_heads": HEADS, "head_dim": DIM, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6],
    },
}  # fmt: skip
LING = SHARED | {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "head_dim": DIM,
    "short_conv_kernel_size": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}


def read(values):
    return read_model(ConfigFields(values, "config.json")).model


def changed(values, path, new):
    """The fields with the one at `path` replaced."""
    first, *rest = path
    return values | {first: changed(values[first], rest, new) if rest else new}


@pytest.mark.parametrize(
    "values, path, new, message",
    [
        (KIMI, ["mla_use_nope"], False, "mla_use_nope must be True to be supported"),
        (KIMI, ["moe_layer_freq"], 2, "moe_layer_freq must be 1 to be supported"),
        (KIMI, ["moe_router_activation_func"], "softmax", "moe_router_activation_func must be"),
        (KIMI, ["num_experts"], 0, "num_experts must be an integer from 1"),
        (KIMI, ["linear_attn_config"], 3, "linear_attn_config must be an object; got 3"),
        (
            KIMI,
            ["linear_attn_config", "full_attn_layers"],
            [7],
            "must be a list of layers from 1 to 6; got",
        ),
        (KIMI, ["linear_attn_config", "kda_layers"], [1], "kda_layers must be"),
        (KIMI, ["linear_attn_config", "num_heads"], 0, "linear_attn_config: num_heads must be"),
        (LING, ["kda_lower_bound"], 5.0, "kda_lower_bound must be above -1e4 and below 0; got 5.0"),
        (LING, ["hidden_act"], "gelu", "hidden_act must be 'silu' to be supported"),
    ],
)
def test_what_is_not_implemented_is_refused_in_the_files_words(values, path, new, message):
    with pytest.raises(ConfigError, match=message):
        read(changed(values, path, new))


def test_layers_are_a_prefix_a_body_and_a_tail():
    layers = list(range(1, 28))
    full = [4, 8, 12, 16, 20, 24, 27]
    of_delta = KIMI["linear_attn_config"] | {
        "full_attn_layers": full, "kda_layers": [x for x in layers if x not in full]
    }  # fmt: skip
    spec = read(KIMI | {"num_hidden_layers": 27, "linear_attn_config": of_delta}).spec
    assert [type(block.mixer) for block in spec.blocks] == [
        MLA if layer in full else KDA for layer in layers
    ]
    kinds = [type(block.feed_forward) for block in spec.blocks]
    assert kinds == [MLP] + [MoE] * 26
    assert len(spec.segments) > 2 and sum(len(s.pattern) for s in spec.segments) < 10


@pytest.mark.slow_cases(reason="zeros of another layer; found by Kimi-Linear's layer there too")
@pytest.mark.parametrize(
    "values", [KIMI, pytest.param(LING, marks=pytest.mark.slow)], ids=["kimi", "ling"]
)
def test_b_gets_columns_of_zeros_that_change_nothing(values):
    """In bfloat16, so that one launch has a layer's projections."""
    model = read(values)
    packed = jax.eval_shape(model.pack, model.param_shapes())
    layer = packed.params["segments"][0]["layers"][0]["mixer"]
    assert layer["in_proj_b"]["weight"].shape == (1, HIDDEN, 128)

    delta = next(block.mixer for block in model.spec.blocks if isinstance(block.mixer, KDA))
    module = delta.build(model.spec.stream, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 1, HIDDEN))
    pools = jnp.ones((3, 3, 3 * HEADS * DIM), jnp.bfloat16), jnp.ones((3, HEADS, DIM, DIM))
    slots, ones = jnp.array([2, 0]), jnp.ones(2, jnp.int32)

    @nnx.jit
    def results(module):
        decoded = module.decode(x, *pools, state_indices=slots)[:3]
        whole = module.prefill(x, *pools, state_indices=slots, seq_lens=ones, query_lens=ones)
        return decoded, whole

    before, weight = results(module), module.in_proj_b.weight
    stack = {"in_proj_b": {"weight": weight[...][None]}}
    wide = delta.widened(model.spec.stream, stack)["in_proj_b.weight"][0]
    assert not wide[:, HEADS:].any()
    weight.set_value(wide)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), before, results(module))


NATIVE_KIMI = {
    name: value
    for name, value in KIMI.items()
    if name not in ("linear_attn_config", "mla_use_nope", "first_k_dense_replace")
} | {
    "linear_num_heads": HEADS, "linear_head_dim": DIM, "linear_conv_kernel_dim": 4,
    "head_dim": ROPE,  # of no meaning
    "layer_types": [
        "full_attention" if layer in (4, 6) else "linear_attention" for layer in range(1, 7)
    ],
    "mlp_layer_types": ["dense", *["sparse"] * 5],
}  # fmt: skip


def test_kimi_is_read_as_transformers_writes_it():
    assert read(NATIVE_KIMI) == read(KIMI)
    words = ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]
    kinds = [
        type(b.feed_forward) for b in read(NATIVE_KIMI | {"mlp_layer_types": words}).spec.blocks
    ]
    assert kinds == [MLP, MoE, MLP, MoE, MoE, MoE]
    with pytest.raises(ConfigError, match="field linear_num_heads is missing"):
        read({name: value for name, value in NATIVE_KIMI.items() if name != "linear_num_heads"})
    with pytest.raises(ConfigError, match="layer_types must be a list of 6 values"):
        read(NATIVE_KIMI | {"layer_types": ["full_attention"]})


def test_words_for_each_layer_win_in_ling():
    """transformers writes its default of first_k_dense_replace beside them."""
    words = {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 2}
    width = {n: x for n, x in LING.items() if n != "short_conv_kernel_size"}
    assert read(LING | words) == read(width | words | {"linear_conv_kernel_dim": 4}) == read(LING)


@pytest.mark.parametrize("values, name", [(KIMI, "num_expert_group"), (LING, "n_group")])
def test_a_null_for_groups_of_experts_is_one_group(values, name):
    assert read(values | {name: None, "topk_group": None}) == read(values)


def test_ling_is_bounded_and_gated_and_turns():
    attention, delta = (read(LING).spec.blocks[layer].mixer for layer in (2, 0))
    assert attention.gated and attention.rope.theta == 1e4
    assert (delta.lower_bound, delta.gate_rank) == (-5.0, None)
    unbounded = read(LING | {"kda_safe_gate": False}).spec.blocks[0].mixer
    assert unbounded.lower_bound is None
    kimi = read(KIMI).spec.blocks
    assert kimi[3].mixer.rope.theta is None and not kimi[3].mixer.gated
    assert (kimi[0].mixer.lower_bound, kimi[0].mixer.gate_rank) == (None, DIM)


# --- a checkpoint -------------------------------------------------------------------------------


def tensors_of(values) -> dict[str, np.ndarray]:
    """Random tensors under the published names."""
    rng, kimi, found = np.random.default_rng(0), values["model_type"] == "kimi_linear", {}
    width, name, out = HEADS * DIM, *(("self_attn", "o_proj") if kimi else ("attention", "dense"))

    def put(prefix, **shapes):
        for key, shape in shapes.items():
            spread = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            at = prefix + key.replace("__", ".")
            found[at] = (rng.normal(size=shape) * spread + (len(shape) == 1)).astype(np.float32)

    def linears(prefix, names, inner, outer):
        for each, (a, b) in zip(
            names, ((outer, inner), (outer, inner), (inner, outer)), strict=True
        ):
            put(prefix, **{f"{each}__weight": (a, b)})

    for layer in range(values["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        put(of, input_layernorm__weight=(HIDDEN,), post_attention_layernorm__weight=(HIDDEN,))
        at = f"{of}{name}."
        attends = layer + 1 in ([4, 6] if kimi else [3])
        put(at, **{f"{out}__weight": (HIDDEN, width)})
        if attends:
            put(at, q_proj__weight=(HEADS * (DIM + ROPE), HIDDEN),
                kv_a_proj_with_mqa__weight=(RANK + ROPE, HIDDEN), kv_a_layernorm__weight=(RANK,),
                kv_b_proj__weight=(HEADS * 2 * DIM, RANK))  # fmt: skip
            if not kimi:
                put(at, g_proj__weight=(HEADS, HIDDEN))
        else:
            for each in "qkv":
                put(at, **{f"{each}_proj__weight": (width, HIDDEN),
                           f"{each}_conv1d__weight": (width, 1, 4)})  # fmt: skip
            for each in "fg":
                if kimi:
                    put(at, **{f"{each}_a_proj__weight": (DIM, HIDDEN),
                               f"{each}_b_proj__weight": (width, DIM)})  # fmt: skip
                else:
                    put(at, **{f"{each}_proj__weight": (width, HIDDEN)})
            put(at, b_proj__weight=(HEADS, HIDDEN), o_norm__weight=(DIM,), dt_bias=(width,))
            put(at, A_log=(HEADS,))
            if kimi:
                found[f"{at}A_log"] = found[f"{at}A_log"].reshape(1, 1, HEADS, 1)
        dense = ("gate_proj", "up_proj", "down_proj")
        if layer == 0:
            linears(f"{of}mlp.", dense, HIDDEN, 24)
            continue
        moe = f"{of}{'block_sparse_moe' if kimi else 'mlp'}."
        put(moe, gate__weight=(4, HIDDEN))
        bias = "e_score_correction_bias" if kimi else "expert_bias"
        found[f"{moe}gate.{bias}"] = rng.normal(size=4).astype(np.float32) / 9
        for expert in range(4):
            linears(f"{moe}experts.{expert}.", ("w1", "w3", "w2") if kimi else dense, HIDDEN, 16)
        linears(f"{moe}shared_experts.", dense, HIDDEN, 16)
    put("", model__norm__weight=(HIDDEN,), lm_head__weight=(VOCAB, HIDDEN))
    put("model.", **{f"{'embed_tokens' if kimi else 'word_embeddings'}__weight": (VOCAB, HIDDEN)})
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Published:
    """The model of published tensors, for one sequence."""

    def __init__(self, values, tensors):
        self.kimi, self.values = values["model_type"] == "kimi_linear", values
        self.w = {name: x.astype(np.float64) for name, x in tensors.items()}

    def logits(self, tokens):
        w, kimi = self.w, self.kimi
        x = w[f"model.{'embed_tokens' if kimi else 'word_embeddings'}.weight"][tokens]
        for layer in range(self.values["num_hidden_layers"]):
            of, name = f"model.layers.{layer}.", "self_attn." if kimi else "attention."
            h = norm(x, w[of + "input_layernorm.weight"])
            attends = f"{of}{name}kv_b_proj.weight" in w
            y = self.attention(h, of + name) if attends else self.delta(h, of + name)
            x = x + y @ w[f"{of}{name}{'o_proj' if kimi else 'dense'}.weight"].T
            h = norm(x, w[of + "post_attention_layernorm.weight"])
            x = x + (self.mlp(h, of + "mlp.") if layer == 0 else self.experts(h, of))
        return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

    def mlp(self, x, at, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (self.w[f"{at}{name}.weight"] for name in names)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, x, of):
        at = of + ("block_sparse_moe." if self.kimi else "mlp.")
        bias = self.w[f"{at}gate.{'e_score_correction_bias' if self.kimi else 'expert_bias'}"]
        names = ("w1", "w3", "w2") if self.kimi else ("gate_proj", "up_proj", "down_proj")
        scores = sigmoid(x @ self.w[at + "gate.weight"].T)
        out = self.mlp(x, at + "shared_experts.")
        for t, row in enumerate(scores):
            best = np.argsort(-(row + bias))[:2]
            for e in best:
                weight = row[e] / row[best].sum() * 1.5
                out[t] += weight * self.mlp(x[t], f"{at}experts.{e}.", names)
        return out

    def delta(self, x, at):
        w, heads = self.w, (len(x), HEADS, DIM)

        def mixed(each):
            taps = w[f"{at}{each}_conv1d.weight"][:, 0]
            padded = np.pad(x @ w[f"{at}{each}_proj.weight"].T, ((3, 0), (0, 0)))
            return silu(sum(padded[j : j + len(x)] * taps[:, j] for j in range(4))).reshape(heads)

        def wide(each):
            if not self.kimi:
                return (x @ w[f"{at}{each}_proj.weight"].T).reshape(heads)
            narrow = x @ w[f"{at}{each}_a_proj.weight"].T
            return (narrow @ w[f"{at}{each}_b_proj.weight"].T).reshape(heads)

        q, k, v = map(mixed, "qkv")
        q, k = (z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
        f = wide("f") + w[at + "dt_bias"].reshape(HEADS, DIM)
        rate = np.exp(w[at + "A_log"].reshape(HEADS, 1))
        g = -rate * np.logaddexp(0, f) if self.kimi else -5 * sigmoid(rate * f)
        beta = sigmoid(x @ w[at + "b_proj.weight"].T)[..., None]
        state, out = np.zeros((HEADS, DIM, DIM)), np.zeros(heads)
        for t in range(len(x)):
            state = state * np.exp(g[t])[:, None]
            delta = beta[t] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
            state = state + delta[..., None] * k[t][:, None]
            out[t] = np.einsum("hvk,hk->hv", state, q[t]) * DIM**-0.5
        y = norm(out, w[at + "o_norm.weight"]) * sigmoid(wide("g"))
        return y.reshape(len(x), -1)

    def attention(self, x, at):
        w, count = self.w, len(x)
        q = (x @ w[at + "q_proj.weight"].T).reshape(count, HEADS, DIM + ROPE)
        latent, k_pe = np.split(x @ w[at + "kv_a_proj_with_mqa.weight"].T, [RANK], axis=1)
        kv = norm(latent, w[at + "kv_a_layernorm.weight"], 1e-6) @ w[at + "kv_b_proj.weight"].T
        k, v = np.split(kv.reshape(count, HEADS, 2 * DIM), 2, axis=-1)
        q_pe = q[..., DIM:]
        if not self.kimi:
            q_pe, k_pe = self.turned(q_pe), self.turned(k_pe[:, None])[:, 0]
        scores = np.einsum("ihd,jhd->hij", q[..., :DIM], k) + np.einsum("ihd,jd->hij", q_pe, k_pe)
        scores = np.where(np.tri(count, dtype=bool), scores * (DIM + ROPE) ** -0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
        if not self.kimi:
            out = out * sigmoid(x @ w[at + "g_proj.weight"].T)[..., None]
        return out.reshape(count, -1)

    def turned(self, x):
        angle = np.arange(len(x))[:, None, None] * 1e4 ** (-np.arange(0, ROPE, 2) / ROPE)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def assert_logits(folder, config, tensors, expected, count):
    """A checkpoint of these tensors gives `expected`'s logits of as many tokens, in float32."""
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    model, params = huggingface_checkpoint.load(folder, dtype="float32")
    tokens = np.random.default_rng(1).integers(0, VOCAB, count)
    found = jax.jit(lambda tokens: model.bind(params)(tokens))(tokens[None])[0]
    np.testing.assert_allclose(found, expected.logits(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.slow(
    reason="a tensor that is read into another place; found by logits of both families' "
    "folders in test_parity too"
)
@pytest.mark.parametrize("values", [KIMI, LING], ids=["kimi", "ling"])
def test_a_checkpoint_gives_the_logits_of_its_published_tensors(values, tmp_path):
    tensors = tensors_of(values)
    assert_logits(tmp_path, values, tensors, Published(values, tensors), 20)


def in_fp8(tensors):
    """(the tensors with their matrices in FP8 blocks, what these mean)."""
    stored, meant = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if x.ndim == 2 and not name.endswith(("gate.weight", "embed_tokens.weight", "head.weight")):
            scale = np.abs(x).max().astype(np.float32) / 448  # of the one block that it has
            stored[name] = (x / scale).astype(jnp.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = np.full((1, 1), scale)
            meant[name] = stored[name].astype(np.float32) * scale
    return stored, meant


@pytest.mark.slow(
    reason="a scale of another matrix; found by delta nets and latents in FP8 in "
    "models/test_fp8_linears too"
)
@pytest.mark.parametrize(
    "values", [KIMI, pytest.param(LING, marks=pytest.mark.slow)], ids=["kimi", "ling"]
)
def test_weights_in_fp8_give_the_logits_of_what_they_mean(values, tmp_path):
    stored, meant = in_fp8(tensors_of(values))
    assert sum(x.dtype == jnp.float8_e4m3fn for x in stored.values()) > 40
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    config = {**values, "quantization_config": quantization}
    assert_logits(tmp_path, config, stored, Published(values, meant), 12)

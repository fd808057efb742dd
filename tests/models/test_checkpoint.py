"""A model folder comes back bit for bit, and every way to damage one is named before it is loaded.

The training script is tested here too: what it leaves is such a folder.
"""

import dataclasses
import doctest
import json
import math
import os
import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint import CheckpointError, native_format
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid, stored_shapes
from scripts import train_tiny
from tests.models.test_safetensors_header import DAMAGED

SMALL = HybridConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_repeats=2,
    gdn_per_repeat=1,
    num_attention_heads=1,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    rope=RopeConfig(dim=8),
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
OUT = "repeats.mla.mla.o_proj.weight"
DECAY = "repeats.gdn.0.gdn.A_log"
YARN = {"factor": 40, "original_max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def params():
    return Hybrid(SMALL).init_params(jax.random.key(0))


@pytest.fixture
def folder(tmp_path, params):
    native_format.save(tmp_path / "model", SMALL, params)
    return tmp_path / "model"


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the dict of tensors and writes the file anew."""
    file = folder / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(file))
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def rewrite_header(folder: Path, change) -> None:
    """Applies `change` to the header alone and leaves the data as it is."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_a_saved_model_comes_back_bit_for_bit(folder, params):
    config, loaded = native_format.load(folder)
    assert config == SMALL
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for (path, mine), (_, theirs) in zip(
        nnx.to_flat_state(params), nnx.to_flat_state(loaded), strict=True
    ):
        assert mine[...].dtype == theirs[...].dtype, path
        np.testing.assert_array_equal(mine[...], theirs[...], err_msg=str(path))
    Hybrid(config).bind(loaded)


def test_names_are_flat_and_dotted_and_the_file_is_plain_safetensors(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert tensors["repeats.gdn.0.gdn.in_proj_qkvz.weight"].shape == (2, 32, 64)
    assert tensors[OUT].dtype == jnp.bfloat16
    assert tensors["repeats.gdn.0.gdn.A_log"].dtype == np.float32
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("order", ["columns", "gaps", "reversed"])
def test_arrays_of_any_strides_are_saved_as_numpy_reads_them(tmp_path, params, order):
    def strided(leaf):
        array = np.asarray(leaf)
        if order == "columns":
            return np.asfortranarray(array)
        if order == "gaps":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return array[::-1].copy()[::-1]

    given = jax.tree.map(strided, params)
    assert not given["embedding"][...].flags.c_contiguous
    native_format.save(tmp_path / "model", SMALL, given)
    _, loaded = native_format.load(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_params_of_another_config_are_not_saved(tmp_path, params):
    other = dataclasses.replace(SMALL, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"down_proj.* is bfloat16\[2, 48, 32\]; expected"):
        native_format.save(tmp_path / "model", other, params)
    assert not (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: No such file"):
        native_format.load(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere.config\.json"):
        native_format.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a model's configuration"),
        ("[]", "it is not a JSON object"),
        ("{}", "missing field vocab_size"),
        (json.dumps(SMALL.to_dict() | {"color": 1}), "unknown field color"),
        (json.dumps(SMALL.to_dict() | {"hidden_size": -1}), "hidden_size must be an integer"),
        (json.dumps(SMALL.to_dict() | {"rms_norm_eps": math.nan}), "rms_norm_eps must be .* nan"),
        (
            json.dumps(SMALL.to_dict() | {"rope": {"dim": 8, "theta": math.inf}}),
            "configuration: rope.theta must be a number above 1 .* got inf",
        ),
        (
            json.dumps(SMALL.to_dict() | {"rope": {"dim": 8, "theta": 1.5, "yarn": YARN}}),
            "configuration: RopeConfig: YaRN's ramp would begin at pair",
        ),
        ('{"hidden_size": 1, "hidden_size": 2}', "it contains 'hidden_size' twice"),
        ("[" * 100_000, "it is nested too deeply"),
        (" " * (2**20 + 1), "has 1,048,577 bytes; a configuration may have at most 1,048,576"),
        (json.dumps(SMALL.to_dict() | {"gdn_per_repeat": 1_000_000}), "from 0 to 63; got 1000000"),
        (json.dumps(SMALL.to_dict() | {"num_repeats": 600}), "are 1,200 layers; at most 1,024"),
    ],
)
def test_a_damaged_config_says_what_is_wrong(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        native_format.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(OUT), rf"'{OUT}' is missing; expected bfloat16\[2, 8, 32\]"),
        (lambda t: t.update(extra=t[OUT]), "unexpected tensor 'extra'"),
        (
            lambda t: t.update({OUT: np.swapaxes(t[OUT], 1, 2).copy()}),
            rf"'{OUT}' is bfloat16\[2, 32, 8\]; expected bfloat16\[2, 8, 32\]",
        ),
        (
            lambda t: t.update({OUT: t[OUT].astype(np.float32)}),
            rf"'{OUT}' is float32\[2, 8, 32\]; expected bfloat16\[2, 8, 32\]",
        ),
        (
            lambda t: t.update({OUT: t[OUT].view(np.int16)}),
            rf"'{OUT}' is I16\[2, 8, 32\]; expected bfloat16",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        native_format.load(folder)


def test_nothing_reaches_a_device_before_all_is_checked(folder, monkeypatch):
    rewrite(folder, lambda t: t.pop(OUT))
    monkeypatch.setattr(jnp, "asarray", lambda *_: pytest.fail("allocated"))
    with pytest.raises(CheckpointError):
        native_format.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 60])
def test_a_file_cut_off_in_its_header_is_refused(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cut off or not a safetensors file"):
        native_format.load(folder)


def test_a_file_cut_off_in_its_data_names_the_first_tensor_lost(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    last = max(header, key=lambda name: header[name]["data_offsets"])
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"cut off within tensor '{last}'"):
        native_format.load(folder)


def test_a_flipped_bit_names_its_tensor(folder):
    def place(header):
        place.begin = header[OUT]["data_offsets"][0]

    rewrite_header(folder, place)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    content[8 + length + place.begin + 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"tensor '{OUT}' is damaged"):
        native_format.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[OUT].pop("shape"), "has a damaged header"),
        (lambda h: h[OUT].update(data_offsets=[0, 8]), f"'{OUT}' has 8 bytes, but bfloat16"),
        (lambda h: h[OUT].update(data_offsets=[-1024, 0]), "cut off|damaged"),
        (lambda h: h[OUT].update(shape="many"), "has a damaged header: .*shape must be a list"),
    ],
)
def test_a_damaged_header_is_refused(folder, change, message):
    rewrite_header(folder, change)
    with pytest.raises(CheckpointError, match=message):
        native_format.load(folder)


def test_a_file_that_is_no_safetensors_is_refused(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops" + bytes(64))
    with pytest.raises(CheckpointError, match="has a damaged header"):
        native_format.load(folder)


@pytest.mark.parametrize("content", [case[0] for case in DAMAGED.values()], ids=DAMAGED)
def test_every_damaged_header_is_an_error_of_the_checkpoint(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        native_format.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(__metadata__=None), "damaged header: __metadata__ must be an object"),
        (lambda h: h.update(__metadata__=[]), "damaged header: __metadata__ must be an object"),
        (lambda h: h[OUT].update(h[DECAY]), rf"'{OUT}' is float32\[2, 1\]; expected bfloat16"),
        (lambda h: h[DECAY].update(shape=[2**62, 2**62]), rf"'{DECAY}' is float32\[4611686018427"),
        (
            lambda h: h[DECAY].update(shape=[1] * 10**5),
            rf"'{DECAY}' is float32\[1, 1, 1, 1, 1, 1, .*\]",
        ),
    ],
)
def test_a_header_of_another_model_is_refused(folder, change, message):
    rewrite_header(folder, change)
    with pytest.raises(CheckpointError, match=message) as told:
        native_format.load(folder)
    assert len(str(told.value)) < 500


def test_bytes_after_the_last_tensor_and_shared_bytes_are_refused(folder):
    def share(header):
        up, gate = (header[f"repeats.mla.mlp.{name}_proj.weight"] for name in ("up", "gate"))
        up["data_offsets"] = gate["data_offsets"]

    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(3))
    with pytest.raises(CheckpointError, match="is damaged: 3 bytes after tensor '.*' belong to no"):
        native_format.load(folder)
    file.write_bytes(whole)
    rewrite_header(folder, share)
    with pytest.raises(CheckpointError, match="is damaged: .* (overlaps|belong to no tensor)"):
        native_format.load(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [OUT, DECAY], ids=["bfloat16", "float32"])
def test_a_tensor_that_is_not_finite_is_named(folder, name, value):
    def spoil(tensors):
        tensors[name].reshape(-1)[-1] = value

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError, match=f"safetensors: NaN or infinity in tensor '{name}'$"):
        native_format.load(folder)


def test_tensors_that_are_not_finite_are_counted(folder):
    rewrite(folder, lambda tensors: [x.fill(np.nan) for x in tensors.values()])
    with pytest.raises(CheckpointError, match=r"in tensor '.*', '.*', '.*', '.*' and \d+ more$"):
        native_format.load(folder)


def test_the_largest_finite_numbers_are_loaded(folder):
    def grow(tensors):
        for x in tensors.values():
            x.reshape(-1)[0] = -jnp.finfo(x.dtype).max

    rewrite(folder, grow)
    native_format.load(folder)


def test_every_block_of_a_tensor_is_scanned(folder, monkeypatch):
    """Of a tensor longer than is scanned at a time."""
    monkeypatch.setattr(native_format, "SCANNED_BYTES", 64)
    native_format.load(folder)  # with the checksums of whole tensors
    for place in 0, 40, -1:
        native_format.save(folder, *native_format.load(folder))
        rewrite(folder, lambda t, place=place: t[OUT].reshape(-1).__setitem__(place, np.nan))
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            native_format.load(folder)
        rewrite(folder, lambda t, place=place: t[OUT].reshape(-1).__setitem__(place, 0))


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, params):
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan) if x.ndim == 2 else x, params)
    with pytest.raises(CheckpointError, match="NaN or infinity in tensor 'embedding', "):
        native_format.save(tmp_path / "model", SMALL, broken)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_regular_file_is_not_read(folder, name):
    """A pipe would wait for a writer, and a device may have no end."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: it is not a regular file"):
        native_format.load(folder)


@pytest.mark.parametrize(
    "values",
    [
        model_resolver.shipped_config("DeepSeek-V2-Lite"),
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": ["llama"], "text_config": None},
    ],
    ids=["known", "unknown", "no type", "absurd"],
)
def test_a_hugging_face_folder_is_told_what_is_supported(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError) as told:
        native_format.load(tmp_path)
    message = str(told.value)
    for part in (
        f"is a Hugging Face configuration (model_type {values.get('model_type')!r})",
        "reads jaxattn's own format, which jaxattn.models.checkpoint describes",
        "jaxattn.models.load(folder) reads these types too: youtu, youtu_llm, deepseek_v2,",
        f"`python -m jaxattn.plan {tmp_path}` plans their memory",
    ):
        assert part in message
    assert "unknown field" not in message


def test_weights_in_several_files_are_told_apart_from_missing_ones(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json, and weights in several files are not"):
        native_format.load(folder)


def test_the_example_of_the_format_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(native_format, raise_on_error=True)
    assert result.attempted == 6 and result.failed == 0


def stated_tensors(config: HybridConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) as the table in the module's text says it."""
    sizes = dict(
        vocab_size=config.vocab_size,
        N=config.num_repeats,
        E=config.hidden_size,
        F=config.intermediate_size,
        H=config.num_attention_heads,
        Q=config.q_lora_rank,
        R=config.kv_lora_rank,
        U=config.qk_nope_head_dim,
        P=config.qk_rope_head_dim,
        V=config.v_head_dim,
        Hk=config.linear_num_key_heads,
        Hv=config.linear_num_value_heads,
        Dk=config.linear_key_head_dim,
        Dv=config.linear_value_head_dim,
        W=config.linear_conv_kernel_dim,
    )
    absent = {
        "without tie_embeddings": config.tie_embeddings,
        "without q_lora_rank": config.q_lora_rank is not None,
        "with q_lora_rank": config.q_lora_rank is None,
    }
    gdn = [f"repeats.gdn.{j}" for j in range(config.gdn_per_repeat)]
    layers = {"G": gdn, "M": ["repeats.mla"], "L": [*gdn, "repeats.mla"]}
    found = {}
    table = re.findall(r"^    ([\w.]+) +(\[.*?\]) *(.*)$", native_format.__doc__, re.MULTILINE)
    for name, shape, note in table:
        if absent.get(note):
            continue
        assert note in ("", "float32", *absent)
        first, _, rest = name.partition(".")
        dtype = "float32" if note == "float32" else config.param_dtype
        names = [f"{layer}.{rest}" for layer in layers[first]] if first in layers else [name]
        found |= dict.fromkeys(names, (dtype, tuple(eval(shape, sizes))))
    return found


@pytest.mark.parametrize("tied, rank, gdn", [(False, None, 1), (True, 12, 2), (False, 12, 0)])
def test_the_table_of_the_format_is_what_a_file_holds(tied, rank, gdn):
    config = dataclasses.replace(
        SMALL, tie_embeddings=tied, q_lora_rank=rank, gdn_per_repeat=gdn, linear_num_value_heads=3
    )
    held = {name: (shape.dtype.name, shape.shape) for name, shape in stored_shapes(config).items()}
    assert stated_tensors(config) == held


def test_a_failed_save_leaves_the_old_model(folder, params):
    before = (folder / "model.safetensors").read_bytes()
    other = dataclasses.replace(SMALL, num_repeats=3)
    with pytest.raises(CheckpointError):
        native_format.save(folder, other, params)
    assert (folder / "model.safetensors").read_bytes() == before
    assert native_format.load(folder)[0] == SMALL


def test_a_full_disk_leaves_the_old_model(folder, params, monkeypatch):
    """Also where only the second file, the configuration, no longer has room."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = Path.write_bytes

    def full(path, data):
        if path.name.startswith("config.json"):
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        native_format.save(folder, SMALL, params)
    assert {name: (folder / name).read_bytes() for name in before} == before


# --- the training script


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A folder like the standard library's, with two held-out modules and their tests."""
    root = tmp_path_factory.mktemp("library")
    files = {
        "ast.py": b"def parse(source):\n    return compile(source)\n" * 60,
        "os.py": b"import sys\n\ndef getenv(name):\n    return sys.env[name]\n" * 60,
        "argparse.py": b"class ArgumentParser:\n    def parse(self):\n        return 1\n" * 8,
        "json/decoder.py": b"def decode(text):\n    return parse(text)\n" * 8,
        "html/entities.py": b"table = {0x26: 38, 0x27: 39, 128: 8364}\n" * 50,
        "site-packages/numpy.py": b"from elsewhere import *\n" * 50,
        "test/test_os.py": b"class TestOs(TestCase):\n    pass\n" * 60,
        "test/test_json/test_decode.py": b"SECRET\n" * 60,
        "test/test_argparse.py": b"SECRET\n" * 60,
        "broken.py": b"\xff\xfe" * 50,
        "empty.py": b"\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return root


def test_held_out_modules_and_their_tests_are_kept_apart(library):
    corpus = train_tiny.read_corpus(library)
    assert sorted(corpus.held_out) == ["argparse.py", "json/decoder.py"]
    text = bytes(corpus.data)
    for word in b"ArgumentParser", b"decode", b"SECRET", b"table", b"elsewhere", b"\xff":
        assert word not in text
    assert b"getenv" in text[: corpus.library_size] and b"TestOs" in text[corpus.library_size :]


def test_a_folder_without_a_library_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no standard library"):
        train_tiny.read_corpus(tmp_path)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 11, 12, 13, 40])
def test_every_held_out_byte_is_scored_once(size):
    text = bytes(range(1, size + 1))
    counts = np.zeros(size + 1, int)
    for tokens, scored in train_tiny.windows({"a": text}, window=8, stride=4, batch=2):
        assert tokens.shape == (2, 9) and scored.shape == (2, 8)
        for row, mask in zip(tokens, scored, strict=True):
            np.add.at(counts, row[1:][mask], 1)
            if mask.any():  # and each sees the byte before it
                context = row[: mask.nonzero()[0].max() + 2].astype(int)
                np.testing.assert_array_equal(np.diff(context), 1)
    assert counts[0] == 0 and np.all(counts[1:] == 1)


@pytest.mark.slow(
    reason="a script that trains nothing; found by examples/finetune and what is saved and "
    "loaded in this file too"
)
def test_training_lowers_the_loss_and_leaves_a_model(library, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL.to_dict()))
    sizes = "--batch 4 --seq-len 64 --steps-per-call 5 --eval-batch 4 --learning-rate 1e-2"
    out = tmp_path / "model"
    shared = ["--out", str(out), "--corpus", str(library), *sizes.split()]
    train_tiny.main([*shared, "--config", str(config), "--steps", "15"])
    printed = capsys.readouterr().out
    losses = [float(line.split("train ")[1].split()[0]) for line in printed.splitlines()[1:-1]]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    result = printed.splitlines()[-1]
    assert float(result.split()[0]) < 7 and "on the 808 held-out bytes" in result
    assert result in (out / "README.md").read_text()
    assert native_format.load(out)[0] == SMALL
    train_tiny.main([*shared, "--eval"])
    assert capsys.readouterr().out.strip() == result

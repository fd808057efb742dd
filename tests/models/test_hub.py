"""Models of the hub: which files are asked for, and what is said when they cannot be fetched."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.loading import hub_download
from jaxattn.models.loading.hub_download import HubError, fetch_config, fetch_text, fetch_weights
from jaxattn.models.loading.loader import read_folder
from tests.helpers.fake_hub import COMMITS, FakeHub, files_of, use

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny_checkpoints"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A hub with two tiny models, and a cache of its own."""
    models = {"org/tiny": files_of(TINY / "youtu"), "org/shards": files_of(TINY / "deepseek_v3")}
    with FakeHub(models).served() as served:
        use(monkeypatch, served.endpoint, tmp_path)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield served


def fetch(name: str, revision: str | None = None, on_progress=None) -> Path:
    folder = fetch_config(name, revision=revision)
    fetch_text(name, folder)
    fetch_weights(name, folder, on_progress=on_progress)
    return folder


TEXT = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "name, weights",
    [
        ("org/tiny", ["model.safetensors"]),
        ("org/shards", ["model.safetensors.index.json", *SHARDS]),
    ],
)
def test_only_the_files_that_are_needed_are_asked_for(fake, name, weights):
    folder = fetch(name)
    assert fake.got() == sorted(["config.json", *TEXT, *weights])
    for file in fake.got():
        assert (folder / file).read_bytes() == fake.models[name][file]
    assert read_folder(folder).open().nbytes > 10**6


def test_only_the_shards_that_the_index_names_are_asked_for(fake):
    fake.models["org/shards"]["model-00004-of-00003.safetensors"] = b"left over"
    fake.models["org/shards"]["model.safetensors"] = b"all of it again"
    fetch("org/shards")
    weights = [name for name in fake.got() if name.endswith(".safetensors")]
    assert weights == SHARDS


def test_an_index_cannot_ask_for_other_files(fake):
    index = {"weight_map": {"x": "../secret.safetensors"}}
    fake.models["org/shards"]["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(CheckpointError, match="not a .safetensors file"):
        fetch("org/shards")
    assert not any("secret" in path for _, path, _ in fake.asked)


def test_a_model_that_is_not_supported_is_refused_by_its_config_alone(fake):
    fake.models["org/tiny"]["config.json"] = b'{"model_type": "gemma2"}'
    with pytest.raises(CheckpointError, match="model_type 'gemma2' is not supported"):
        read_folder(fetch_config("org/tiny"))
    assert fake.got() == ["config.json"]


def test_a_revision_is_asked_for_and_all_files_are_of_its_commit(fake):
    folder = fetch("org/tiny", "v1")
    assert folder.name == COMMITS["v1"]
    assert fake.revisions("config.json") == {"v1"}
    assert fake.revisions("model.safetensors") == {COMMITS["v1"]}
    assert fake.revisions("tokenizer.json") == {COMMITS["v1"]}
    with pytest.raises(HubError, match="org/tiny has no revision 'v9' on the hub"):
        fetch("org/tiny", "v9")


def test_progress_ends_with_all_bytes(fake):
    seen = []
    fetch("org/shards", on_progress=lambda *now: seen.append(now))
    total = sum(len(fake.models["org/shards"][shard]) for shard in SHARDS)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_bytes_of_the_chunked_store_count_once_when_they_are_on_the_disk():
    """Xet reports what comes over the network beside what is written."""
    progress = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting")
    seen, options = [], {"total": 100, "log_level": 0, "name": "a.b"}
    bar = hub_download._counting(seen.append)
    with progress.XetDownloadProgressReporter(
        reconstruction_desc="file", tqdm_class=bar, **options
    ) as reporter:
        for done in (10, 60, 100):
            report = dict.fromkeys(
                ("total_bytes_completed", "total_transfer_bytes_completed"), done
            )
            rates = ("total_bytes_completion_rate", "total_transfer_bytes_completion_rate")
            report |= dict.fromkeys(rates, 5.0) | {"total_bytes": 100}
            reporter.update_progress(SimpleNamespace(**report))
    assert seen == [10, 50, 40]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(fake, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    fake.cut["model.safetensors"] = 1_000_000
    folder = fetch("org/tiny")
    whole = fake.models["org/tiny"]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == whole
    first, second = (h for m, p, h in fake.asked if m == "GET" and p.endswith("/model.safetensors"))
    assert "Range" not in first
    assert 990_000 <= int(second["Range"].removeprefix("bytes=").rstrip("-")) <= 1_000_000


def test_what_is_there_is_not_fetched_again(fake):
    fetch("org/shards")
    (lost,) = Path(constants.HF_HUB_CACHE).rglob("model-00002*")
    lost.resolve().unlink()
    lost.unlink()
    fake.asked.clear()
    fetch("org/shards")
    assert fake.got() == ["model-00002-of-00003.safetensors"]


def test_what_progress_raises_ends_the_transfer(fake):
    def stop(done, total):
        raise InterruptedError("enough")

    with pytest.raises(HubError, match="enough"):
        fetch("org/tiny", on_progress=stop)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_what_it_wants(fake, status, monkeypatch):
    fake.refuse["org/tiny"] = (status, "GatedRepo")
    page = f"accept its terms at {fake.endpoint}/org/tiny"
    with pytest.raises(HubError, match=f"is gated: {page}, and set HF_TOKEN"):
        fetch("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(HubError, match=f"is gated: {page} with the account of your HF_TOKEN"):
        fetch("org/tiny")
    assert fake.asked[-1][2]["authorization"] == "Bearer hf_secret"


REFUSED = {
    "missing": ((401, "RepoNotFound"), "has no model org/tiny, or it is private: .* set HF_TOKEN"),
    "404": ((404, "RepoNotFound"), "the hub has no model org/tiny, or it is private"),
    "forbidden": ((403, ""), r"127.0.0.1:\d+ answered 403: HF_TOKEN may not read it"),
    "down": ((503, ""), r"127.0.0.1:\d+ answered 503"),
}


@pytest.mark.parametrize("answer, message", REFUSED.values(), ids=REFUSED)
def test_what_the_hub_refuses_is_one_line(fake, answer, message):
    fake.refuse["org/tiny"] = answer
    with pytest.raises(HubError, match=message) as error:
        fetch("org/tiny")
    assert "\n" not in str(error.value)


def test_a_repository_without_a_model(fake):
    fake.models["org/data"] = {"README.md": b""}
    with pytest.raises(HubError, match="org/data has no config.json on the hub"):
        fetch("org/data")
    fake.models["org/pickles"] = files_of(TINY / "youtu")
    del fake.models["org/pickles"]["model.safetensors"]
    with pytest.raises(HubError, match="org/pickles has no model.safetensors: only safetensors"):
        fetch("org/pickles")
    assert "pytorch_model.bin" not in fake.got()


def test_offline_takes_what_is_cached_and_asks_nobody(fake, monkeypatch):
    fetch("org/shards")
    fetch("org/tiny", "v1")
    fake.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_folder(fetch("org/shards")).open().nbytes > 10**6
    fetch("org/tiny", "v1")
    cache = constants.HF_HUB_CACHE
    with pytest.raises(
        HubError, match=f"HF_HUB_OFFLINE is set, but org/tiny is not complete in {cache}"
    ):
        fetch("org/tiny")
    (shard,) = Path(cache).rglob("model-00002*")
    shard.unlink()
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, but org/shards is not complete in"):
        fetch("org/shards")
    assert fake.asked == []


def test_without_a_network_the_cache_serves(fake, monkeypatch):
    fetch("org/shards")
    nowhere = "http://127.0.0.1:9"
    use(monkeypatch, nowhere, Path(constants.HF_HUB_CACHE).parent)
    fetch("org/shards")
    with pytest.raises(
        HubError, match=f"org/tiny is not in the cache, and {nowhere} cannot be reached"
    ):
        fetch("org/tiny")
    (shard,) = Path(constants.HF_HUB_CACHE).rglob("model-00002*")
    shard.unlink()
    with pytest.raises(HubError, match=f"org/shards: .*{nowhere}"):
        fetch("org/shards")


def test_a_disk_without_room_is_said_before_the_transfer(fake, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1_000_000))
    with pytest.raises(
        HubError, match=r"org/tiny needs [\d,]+ more bytes, but .* has 1,000,000 free"
    ):
        fetch("org/tiny")
    assert "model.safetensors" not in fake.got()


def test_a_disk_that_fills_up_is_named(fake, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_download, "hf_hub_download", full)
    with pytest.raises(HubError, match="org/tiny: no space is left in .* set HF_HOME"):
        fetch("org/tiny")


@pytest.mark.slow(
    reason="a variable that is read when a module is imported; found by the tests of tokens, "
    "endpoints and revisions there, in one process, too"
)
def test_the_library_s_variables_hold_in_a_command(fake, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_TOKEN are read when Python starts; a plan wants config.json."""
    command = [sys.executable, "-m", "jaxattn.serve", "--model", "org/tiny", "--plan", "--json"]
    variables = {
        "HF_ENDPOINT": fake.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_secret",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [*command, "--revision", "v1"],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout)["fits"]
    assert fake.got() == ["config.json"] and fake.revisions("config.json") == {"v1"}
    assert all(h["authorization"] == "Bearer hf_secret" for _, p, h in fake.asked if "config" in p)
    assert list((tmp_path / "home").rglob("config.json"))

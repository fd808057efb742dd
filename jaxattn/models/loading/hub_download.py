"""Download of a model from the Hugging Face Hub: only the files that are needed.

    folder = fetch_config("org/name", revision="main")
    fetch_text("org/name", folder)
    fetch_weights("org/name", folder, on_progress=print)

This order lets the caller reject a model by its config.json before it downloads gigabytes. All
three functions use one commit, which names the folder that `fetch_config` returns.

`huggingface_hub` does the transfer and follows its own conventions: HF_HOME is the cache, HF_TOKEN
the token, HF_ENDPOINT another Hub, and HF_HUB_OFFLINE restricts it to the cache. Code, pickles and
weights in other formats are never downloaded.
"""

import concurrent.futures
import contextlib
import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm

from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_index import CONFIG, INDEX, WEIGHTS, shards_of
from jaxattn.models.loading.pooling_config import MODULES, POOLING
from jaxattn.models.loading.weight_loader import OnProgress

TEXT = (
    *(MODULES, POOLING),
    "generation_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
AT_A_TIME = 4


class HubError(CheckpointError):
    """A model cannot be downloaded; the message is one line."""


def fetch_config(name: str, *, revision: str | None = None) -> Path:
    """Downloads the model's config.json only, and returns its folder.

    Args:
        revision: A branch, a tag or a commit. None means the main branch.

    Raises:
        HubError: There is no such model or revision, access is denied, or the Hub is unreachable.
    """
    with _translate_errors(name, revision):
        return Path(hf_hub_download(name, CONFIG, revision=revision)).parent


def fetch_text(name: str, folder: Path) -> None:
    """Downloads the files of tokenizer and embedding settings, as far as the model has them.

    Args:
        folder: The result of `fetch_config`.

    Raises:
        HubError: See `fetch_config`.
    """
    with _translate_errors(name):
        _fetch(name, folder, _sizes(name, folder, TEXT, required=False))


def fetch_weights(name: str, folder: Path, *, on_progress: OnProgress | None = None) -> None:
    """Downloads model.safetensors, or the shards that the model's index names.

    Args:
        folder: The result of `fetch_config`.
        on_progress: Callback with the bytes done and the total bytes, called from any thread. An
            exception from it ends the transfer.

    Raises:
        HubError: See `fetch_config`; also if the model has no safetensors, or the disk no space.
        CheckpointError: The index is damaged.
    """
    with _translate_errors(name):
        _fetch(name, folder, _sizes(name, folder, [INDEX], required=False))
        names = shards_of(folder / INDEX) if (folder / INDEX).is_file() else [WEIGHTS]
        sizes = _sizes(name, folder, names, required=True)
        if missing := [file for file in names if file not in sizes]:
            raise HubError(f"{name} has no {missing[0]}: only safetensors files are supported")
        _check_room(name, folder, sizes)
        _fetch(name, folder, sizes, on_progress)


def _sizes(name: str, folder: Path, files: Sequence[str], *, required: bool) -> dict[str, int]:
    """Returns the sizes in bytes of those files that the commit contains.

    Args:
        required: If True, cached files do not suffice when the Hub is unreachable.
    """
    cached = {file: (folder / file).stat().st_size for file in files if (folder / file).is_file()}
    if len(cached) == len(files):
        return cached
    try:
        found = HfApi().get_paths_info(name, list(files), revision=folder.name)
    except (OfflineModeIsEnabled, HTTPError):
        if required:
            raise
        return cached
    return {each.path: each.size for each in found if isinstance(each, RepoFile)}


def _check_room(name: str, folder: Path, sizes: dict[str, int]) -> None:
    wanted = sum(size for file, size in sizes.items() if not (folder / file).exists())
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise HubError(
            f"{name} needs {wanted:,} more bytes, but {constants.HF_HUB_CACHE} has {free:,} free; "
            "free some space, or set HF_HOME to a larger disk"
        )


def _fetch(
    name: str, folder: Path, sizes: dict[str, int], on_progress: OnProgress | None = None
) -> None:
    """Downloads files of the folder's commit, several at a time; keeps existing files."""
    total, done = sum(sizes.values()), 0
    lock = threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if on_progress:
                on_progress(done, total)

    def fetch(file: str) -> None:
        if (folder / file).exists():
            count(sizes[file])
            return
        hf_hub_download(name, file, revision=folder.name, tqdm_class=_counting(count))

    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        started = [pool.submit(fetch, file) for file in sizes]
        try:
            for each in concurrent.futures.as_completed(started):
                each.result()
        except BaseException:
            for each in started:
                each.cancel()
            raise


def _counting(count: Callable[[int], None]) -> type[tqdm]:
    """Returns a progress bar class that draws nothing and counts bytes."""

    class Counting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))  # bytes on the disk

        def update_transfer(self, n: float | None = 1) -> None:
            """Ignores bytes from the network, which arrive before they are on the disk."""

        def set_transfer_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            """Ignores the transfer rate."""

    return Counting


@contextlib.contextmanager
def _translate_errors(name: str, revision: str | None = None) -> Iterator[None]:
    """Converts every error of the Hub or the network to a HubError with a message of one line."""
    try:
        yield
    except GatedRepoError as error:
        raise HubError(_gated(name)) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name} has no revision {revision or 'main'!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"the hub has no model {name}, or it is private: check the name"
            + ("" if get_token() else ", or set HF_TOKEN to a token that may read it")
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise HubError(_unreachable(name, error)) from error
    except EntryNotFoundError as error:
        raise HubError(f"{name} has no {CONFIG} on the hub: it is not a model") from error
    except HfHubHTTPError as error:
        raise HubError(_answered(name, error)) from error
    except HTTPError as error:
        raise HubError(
            f"{name}: the connection to {constants.ENDPOINT} failed: {_line(error)}"
        ) from error
    except HFValidationError as error:
        raise HubError(f"{name} is not a valid name on the hub: {_line(error)}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HubError(
                f"{name}: no space is left in {constants.HF_HUB_CACHE}; free some, or set HF_HOME "
                "to a larger disk"
            ) from error
        raise HubError(f"{name}: {error.filename or 'the hub'}: {_line(error)}") from error


def _gated(name: str) -> str:
    said = f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}"
    if get_token():
        return f"{said} with the account of your HF_TOKEN"
    return f"{said}, and set HF_TOKEN to a token of your account"


def _answered(name: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    why = ": HF_TOKEN may not read it, or is not a valid token" if status in (401, 403) else ""
    return f"{name}: {constants.ENDPOINT} answered {status}{why}"


def _unreachable(name: str, error: Exception) -> str:
    if constants.is_offline_mode():
        return f"HF_HUB_OFFLINE is set, but {name} is not complete in {constants.HF_HUB_CACHE}"
    cause = error.__cause__
    if isinstance(cause, HfHubHTTPError):
        return _answered(name, cause)
    why = f" ({_line(cause)})" if cause else ""
    return f"{name} is not in the cache, and {constants.ENDPOINT} cannot be reached{why}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())

"""A compressed model as a folder in the conventions of the Hugging Face Hub.

``model.safetensors`` and ``manifest.json`` are those of :func:`tensigma.save`, so :func:`tensigma.load` reads the
folder too. ``config.json`` names the architecture, ``README.md`` is the model card, and ``report.json`` the report.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.compression import Report
from tensigma.deployment import load, save
from tensigma.errors import InputError, StoreError
from tensigma.evaluation import Evaluation
from tensigma.files import read_json, recover, seal, whole_folder
from tensigma.hub.card import model_card
from tensigma.hub.config import CONFIG, LIBRARY, Config
from tensigma.zoo import load_model, require

CARD = "README.md"
REPORT = "report.json"
#: All that is downloaded: nothing that could execute code.
FILES = (CONFIG, CARD, REPORT, "manifest.json", "model.safetensors", "model.onnx")
_REPO = re.compile(r"(?:[\w.-]+/)?[\w.-]+")


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    report: Report | None = None,
    *,
    evaluation: Evaluation | None = None,
    architecture: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    title: str | None = None,
    force: bool = False,
) -> None:
    """Write a compressed model to ``folder`` as the Hugging Face Hub expects it, all of it or nothing.

    Args:
        model: Any model that :func:`tensigma.save` takes.
        folder: The folder; one that this function wrote is replaced with ``force``.
        report: What :func:`tensigma.compress` returned. Its figures make the model card, and it is stored beside it.
        evaluation: What :func:`tensigma.evaluate` found, for the card; by default what the report notes.
        architecture: What the model is built by, as :func:`tensigma.zoo.load_model` takes it, such as
            ``"torchvision:resnet18"``. That of a timm model is known, and so is that of a report that names one.
        base_model: Repository of the original model on the Hub, for the card.
        license: Licence of the weights, as the Hub abbreviates it.
        tags: More tags for the card.
        title: Headline of the card; by default, the name of the architecture.

    Needs ``pip install 'tensigma[hub]'``, for the metadata of the card.

    >>> import tempfile
    >>> import tensigma as ts
    >>> build = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> model = build()
    >>> small, report = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ts.save_pretrained(small, f"{place}/small", report, license="mit")
    ...     sorted(file.name for file in Path(f"{place}/small").iterdir())
    ...     again = ts.from_pretrained(f"{place}/small", build())
    ['README.md', 'config.json', 'manifest.json', 'model.safetensors', 'report.json']
    >>> again[0].reduce.weight.equal(small[0].reduce.weight)
    True
    """
    config = Config.of(model, report, architecture)
    text = model_card(
        report,
        evaluation=evaluation,
        config=config,
        base_model=base_model,
        license=license,
        tags=tags,
        title=title,
    )
    with whole_folder(Path(folder), force=force, is_ours=_is_ours) as place:
        save(model, place)
        config.write(place)
        (place / CARD).write_text(text, encoding="utf-8")
        if report is not None:
            content = json.dumps(seal(report.to_json()), ensure_ascii=False)
            (place / REPORT).write_text(content + "\n", encoding="utf-8")


def from_pretrained(
    folder_or_repo: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    dense: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> nn.Module:
    """The compressed model in a folder or in a repository of the Hugging Face Hub, in the mode of ``model``.

    A name that is no folder is a repository, such as ``"you/resnet18-half"``; it is downloaded to the Hub's cache. Only
    weights, JSON and the card are downloaded, and none of them can execute code.

    Args:
        folder_or_repo: A folder written by :func:`save_pretrained` or :func:`tensigma.save`, or a repository.
        model: The original architecture, with any weights. Without it, the architecture that ``config.json`` names is
            built, in evaluation mode; that of a timm model needs timm.
        dense: Give plain layers instead of compressed ones, as :func:`tensigma.load` does.
        revision: Branch, tag or commit of a repository.
        token: For a private repository; by default the one that ``hf auth login`` stored.
        cache_dir: Where downloads are kept, if not in the Hub's own cache.
        local_files_only: Take what was downloaded before, without the network.

    >>> import tempfile
    >>> import tensigma as ts
    >>> model = ts.zoo.load_model("zoo:digits-cnn?width=8")
    >>> small, report = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"conv2": 4}), norm="frobenius"))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ts.save_pretrained(small, f"{place}/small", report, architecture="zoo:digits-cnn?width=8")
    ...     again = ts.from_pretrained(f"{place}/small")
    >>> sum(p.numel() for p in again.parameters()) == report.after.params, again.training
    (True, False)
    """
    place = Path(folder_or_repo)
    recover(place)
    if not place.is_dir():
        options = {"revision": revision, "token": token, "local_files_only": local_files_only}
        place = _downloaded(os.fspath(folder_or_repo), cache_dir=cache_dir, **options)
    config = Config.read(place)
    if model is None and config.model is not None:
        model = load_model(config.model)
        try:
            return load(place, model, dense=dense)
        except StoreError as error:
            if "another architecture" not in str(error):
                raise
            raise StoreError(
                f"{CONFIG} names {config.model}, which does not fit ({error}); build the model and pass {{model}}",
                parameters=("model",),
            ) from error
    return load(place, model, dense=dense)


def _downloaded(repo: str, **options: Any) -> Path:
    """A local copy of a repository."""
    if not _REPO.fullmatch(repo):
        raise StoreError(f"{repo}: no such folder, and no name of a repository either, such as you/resnet18-half")
    hub = require("huggingface_hub", "hub", f"{repo} is no folder, and loading it from the Hub")
    try:
        return Path(hub.snapshot_download(repo, allow_patterns=list(FILES), library_name=LIBRARY, **options))
    except (hub.errors.HfHubHTTPError, hub.errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise StoreError(
            f"{repo} is no folder, and cannot be loaded from the Hub as a repository: {_first_line(error)}"
        ) from error


def check_repo(repo: str) -> None:
    """Refuse what cannot be the name of a repository."""
    if not _REPO.fullmatch(repo):
        raise InputError(f"{repo!r} is no name of a repository; give one such as you/resnet18-half")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _is_ours(folder: Path) -> bool:
    try:
        return read_json(folder / CONFIG).get("library_name") == LIBRARY
    except (StoreError, AttributeError):
        return False

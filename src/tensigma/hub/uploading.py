"""A compressed model to a repository of the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.compression import Report
from tensigma.errors import StoreError
from tensigma.hub.folders import FILES, check_repo, save_pretrained
from tensigma.zoo import require


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    report: Report | None = None,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload a model compressed by Tensigma",
    **card: Any,
) -> str:
    """Upload a compressed model with its card, in one commit, and return the address of that commit.

    The repository is created if it does not exist. Of files that are there, those of an earlier upload are replaced,
    and all others stay.

    Args:
        model: Any model that :func:`tensigma.save` takes.
        repo_id: The repository, such as ``"you/resnet18-half"``.
        report: What :func:`tensigma.compress` returned, for the card.
        private: Whether a new repository is private; by default as the Hub decides.
        token: By default the one that ``hf auth login`` stored.
        revision: The branch to commit to.
        create_pr: Open a pull request instead of committing to the branch.
        commit_message: First line of the commit.
        **card: ``evaluation``, ``architecture``, ``base_model``, ``license``, ``tags`` and ``title``, as
            :func:`save_pretrained` takes them.

    >>> import tensigma as ts
    >>> ts.push_to_hub(nn.Linear(2, 2), "not a repository")
    Traceback (most recent call last):
    tensigma.errors.InputError: 'not a repository' is no name of a repository; give one such as you/resnet18-half
    """
    check_repo(repo_id)
    hub = require("huggingface_hub", "hub", "push_to_hub")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        # Before anything is sent: a model that cannot be saved leaves no empty repository.
        save_pretrained(model, folder, report, **card)
        written = {file.name for file in folder.iterdir()}
        try:
            api = hub.HfApi(token=token, library_name="tensigma")
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo.repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                # A model that was weights and is now a graph must not leave the weights behind.
                delete_patterns=[name for name in FILES if name not in written],
            )
        except (hub.errors.HfHubHTTPError, OSError) as error:
            raise StoreError(f"{repo_id} could not be uploaded: {error}") from error
    return str(commit.commit_url)

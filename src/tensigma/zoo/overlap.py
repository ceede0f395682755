"""Whether two names of data may mean some of the same images."""

from __future__ import annotations

from pathlib import Path

from tensigma.errors import TensigmaError
from tensigma.zoo.shards import shard_files
from tensigma.zoo.spec import Spec

#: Sets whose test images are stored separately; without a split their names mean the training images.
_STORED_SEPARATELY = ("cifar10", "cifar100", "hf")


def may_share(first: str, second: str) -> bool:
    """Whether any image may be in both; names of mixtures are joined by ``" + "``.

    Sets count as disjoint only if their names show it: different places, or different parts of one split.

    >>> may_share("digits:?split=train&holdout=0.3&samples=600", "digits:?split=train&holdout=0.3&samples=500")
    True
    >>> may_share("digits:?split=train&holdout=0.3", "digits:?split=val&holdout=0.3")
    False
    >>> may_share("digits:?split=train&holdout=0.1", "digits:?split=val&holdout=0.3")
    True
    >>> may_share("cifar10:data", "cifar10:data?split=test")
    False
    """
    return any(_pair(one, other) for one in first.split(" + ") for other in second.split(" + "))


def _pair(first: str, second: str) -> bool:
    try:
        one, other = Spec.parse(first), Spec.parse(second)
    except TensigmaError:
        return first == second
    if one.scheme != other.scheme or not _same_place(one, other):
        return False
    default = "train" if one.scheme in _STORED_SEPARATELY else None
    parts = {spec.options.get("split", default) for spec in (one, other)}
    if len(parts) == 1 or None in parts:
        return True
    if "test" in parts:
        return False
    # The held-out share is drawn by the seed.
    return any(one.options.get(key) != other.options.get(key) for key in ("holdout", "seed"))


def _same_place(one: Spec, other: Spec) -> bool:
    if one.scheme in ("digits", "file"):
        return one.target == other.target
    if one.scheme == "webdataset":
        return _share_a_shard(one, other)
    places = [Path(spec.target).expanduser().resolve() for spec in (one, other)]
    return places[0] == places[1] or places[0] in places[1].parents or places[1] in places[0].parents


def _share_a_shard(one: Spec, other: Spec) -> bool:
    try:
        first, second = ({file.resolve() for file in shard_files(spec.target)} for spec in (one, other))
    except TensigmaError:
        return True
    return not first.isdisjoint(second)
